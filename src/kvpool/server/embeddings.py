"""`/v1/embeddings`: one vector for each text, as OpenAI's endpoint gives them."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from kvpool.errors import KVPoolError
from kvpool.server.auth import Caller
from kvpool.server.body import Body, Int, Text, Tokens
from kvpool.server.errors import Problem, problem_of
from kvpool.server.limits import Gate
from kvpool.server.served_model import ServedModel, scope_for_tenant


class Embeddings(Body):
    """`POST /v1/embeddings`. `pooling` takes the hidden state of the last token, or the mean over all tokens."""

    input: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Int, Field(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    cache_salt: str = ""
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] = 0


async def embed(body: Embeddings, model: ServedModel, caller: Caller, gate: Gate) -> dict[str, Any]:
    """The vectors of all texts."""
    several = isinstance(body.input, list) and not isinstance(body.input[0], int)
    given: list[Any] = list(body.input) if several else [body.input]
    most = gate.limits.prompts
    if len(given) > most:
        raise Problem(400, f"{len(given)} texts are over this server's limit of {most} at once", param="input")
    prompts = await asyncio.gather(*(model.tokens(each) for each in given))
    if (longest := max(map(len, prompts))) > gate.limits.prompt_tokens:
        limit = gate.limits.prompt_tokens
        raise Problem(400, f"a text has {longest} tokens, the limit is {limit}", code="context_length_exceeded")
    call = partial(
        model.engine.embed,
        prompts,
        pooling=body.pooling,
        normalize=body.normalize,
        adapter=model.adapter,
        priority=body.priority,
        scope=scope_for_tenant(caller.tenant, body.cache_salt),
    )
    with gate.passed(caller.key, len(prompts)):
        try:
            vectors = await asyncio.to_thread(call)
        except KVPoolError as error:
            raise problem_of(error) from error
    if body.dimensions not in (None, vectors.shape[1]):
        words = f"the model's vectors have {vectors.shape[1]} numbers, and are not cut to {body.dimensions}"
        raise Problem(400, words, code="unsupported", param="dimensions")
    as_text = body.encoding_format == "base64"
    told = [base64.b64encode(each.tobytes()).decode() if as_text else each.tolist() for each in vectors]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(told)]
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": model.name, "usage": usage}
