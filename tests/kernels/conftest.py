"""Makes the cases of attention importable, and Triton's interpreter work with numpy 2.4 and without doing things twice."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "attention"))  # paged_cases


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where there is a GPU, kernels are compiled, and none of them takes tensors of the CPU."""
    case = getattr(item, "callspec", None)
    if case is not None and case.params.get("device") == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("a GPU runs the compiled kernels")


if os.environ.get("TRITON_INTERPRET") and importlib.util.find_spec("triton") is not None:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        """Scalars are arrays of one element in Triton 3.6's interpreter; numpy 2.4 no longer makes these an index."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy

    patch_language = interpreter._patch_lang

    def patch_language_once(function: Any) -> Any:
        """A kernel's launch has replaced the language; each call of a function in it would look at all of it again."""
        language = interpreter.tl
        seen = [each for each in function.__globals__.values() if each is language or each is language.core]
        if any(language.core.is_builtin(each.program_id) for each in seen):
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language_once
