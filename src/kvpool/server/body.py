"""What every body of a request is made of: numbers and texts by their documented types, and no field that is not known."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


def _whole(value: Any) -> Any:
    """Turns 5.0 into the integer 5, as JSON means it; leaves everything else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _truth(value: Any) -> Any:
    """Refuses 0 and 1, which equal False and True in Python."""
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


No = Annotated[Literal[False], BeforeValidator(_truth)]
Yes = Annotated[Literal[True], BeforeValidator(_truth)]
Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Int, Field(ge=1, lt=2**31)]
One = Annotated[Int, Field(ge=1, le=1)]  # answers, where a form has no place for more
Token = Annotated[Int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """Values must have the documented types: "1" is no number. Unknown fields are refused: nothing is ignored silently."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Treats null as if the field were missing: many clients send null for fields that were not set."""
        if not isinstance(data, dict):
            return data
        needed = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name in needed}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The document says so, too."""
        found = handler.resolve_ref_schema(handler(core_schema))
        needed = found.get("required", ())
        for name, field in found.get("properties", {}).items():
            if name not in needed and {"type": "null"} not in field.get("anyOf", ()):
                kept = {key: field.pop(key) for key in ("title", "default") if key in field}
                found["properties"][name] = {"anyOf": [field, {"type": "null"}], **kept}
        return found
