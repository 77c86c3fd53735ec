"""`upload_by_kernel` in Triton: programs that read page-locked memory of the host."""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # words of one program


@triton.jit(do_not_specialize=["num_words"])
def _copy_words_kernel(source, target, num_words, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_words
    tl.store(target + at, tl.load(source + at, mask=inside, cache_modifier=".cv"), mask=inside)


def copy_words(source: Tensor, target: Tensor) -> None:
    """`target[:] = source` for int32 words."""
    count = source.numel()
    _copy_words_kernel[(triton.cdiv(count, _CHUNK),)](source, target, count, CHUNK=_CHUNK, num_warps=4)
