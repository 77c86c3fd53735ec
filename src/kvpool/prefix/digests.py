"""The identity of a block outside this process: chained SHA-256 over the reuse scope and every token up to its end.

Inside the process the prefix cache compares tokens and needs no digest. A digest is computed only for a block that is
announced or leaves the process, where it alone decides a hit: it is therefore never shortened, and it depends on
everything that makes keys and values differ, so equal tokens at another place or in another scope never match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.pools.symbols import encoded_key
from kvpool.scope import MultimodalItem, ReuseScope

DIGEST_BYTES = 32

# A digest chain starts from this tag, so that a scope can never be mistaken for a block; change it with the encoding.
_SCOPE_TAG = b"kvpool scope 1\0"
_SALTED_TAG = b"kvpool salted scope 1\0"

# Stands before each multimodal item of a block: as a token it would be negative, so no block of tokens alone can have it.
_ITEM_TAG = b"\xff\xff\xff\xff"


def _compiled_hashing() -> Callable[[bytes, Any, int], list[bytes]] | None:
    """What hashes a whole run in one call, where it was compiled and the processor has instructions for SHA-256."""
    try:
        from kvpool.prefix import _sha256_chain
    except ImportError:
        return None
    return _sha256_chain.hash_run


_hash_run = _compiled_hashing()


def root_digest(scope: ReuseScope) -> bytes:
    """The parent of the first block of every sequence in this scope. Different scopes have different roots.

    >>> root_digest(ReuseScope(tenant="ab")) == root_digest(ReuseScope(tenant="a", adapter="b"))
    False
    """
    fields = scope.fields
    if scope.salt:  # under a tag of its own, so that the other fields may be as many as they are
        fields.append(scope.salt)
    message = bytearray(_SALTED_TAG if scope.salt else _SCOPE_TAG)
    for field in fields:
        # surrogatepass: every Python string has an encoding, and no two share one
        encoded = field.encode("utf-8", "surrogatepass")
        message += len(encoded).to_bytes(8, "little")
        message += encoded
    return hashlib.sha256(message).digest()


def chain_digests(
    parent: bytes, tokens: npt.NDArray[np.int32], block_size: int, multimodal: Sequence[MultimodalItem] = ()
) -> list[bytes]:
    """One digest per block of `tokens`: SHA-256 of the digest before it and its tokens as little-endian int32.

    `parent` is the digest of the block before the first one, or `root_digest(scope)` at the start of a sequence. The items
    of `multimodal` that a block has placeholders of count too: where each begins, its length and its key. Positions are
    those in `tokens`, negative for an item that begins before them.

    >>> prompt = np.arange(70, dtype=np.int32)
    >>> whole_blocks = prompt[: len(prompt) // 16 * 16]
    >>> len(chain_digests(root_digest(ReuseScope()), whole_blocks, 16))
    4
    """
    if len(parent) != DIGEST_BYTES:
        raise InvalidArgumentError(f"a parent digest has {DIGEST_BYTES} bytes, got {len(parent)}; see root_digest()")
    if block_size < 1:
        raise InvalidArgumentError(f"block_size must be >= 1, got {block_size}")
    _check_tokens(tokens)
    if len(tokens) % block_size:
        raise InvalidArgumentError(
            f"only whole blocks have a digest: {len(tokens)} tokens are not a multiple of block_size {block_size}; "
            f"cut them to {len(tokens) // block_size * block_size}"
        )
    packed = np.ascontiguousarray(tokens, dtype="<i4")
    if _hash_run is not None and not multimodal:
        return _hash_run(parent, packed, 4 * block_size)
    # As a void dtype, tolist() cuts the array into one bytes object per block without a Python step (void, unlike
    # "S", keeps trailing zeros).
    blocks = packed.view(f"V{4 * block_size}").tolist()
    if multimodal:
        extras = _items_by_block(multimodal, block_size, len(blocks))
        blocks = [block + extra for block, extra in zip(blocks, extras, strict=True)]
    return _hash_each(parent, blocks)


def _hash_each(parent: bytes, blocks: list[bytes]) -> list[bytes]:
    """A chain of digests, block by block. Copies of an empty hash spare a part of what OpenSSL does for a new one."""
    new_hash = hashlib.sha256().copy
    digests: list[bytes] = []
    for block in blocks:
        state = new_hash()
        state.update(parent)
        state.update(block)
        parent = state.digest()
        digests.append(parent)
    return digests


def _items_by_block(items: Sequence[MultimodalItem], block_size: int, num_blocks: int) -> list[bytes]:
    """What each block's message says about the items that it has placeholders of."""
    found = [b""] * num_blocks
    for position, length, key in items:
        name = encoded_key(key)
        for block in range(max(0, position // block_size), min(num_blocks, ceil_div(position + length, block_size))):
            numbers = np.array([position - block * block_size, length, len(name)], "<i8")
            found[block] += _ITEM_TAG + numbers.tobytes() + name
    return found


def _check_tokens(tokens: object) -> None:
    # Other integers are refused, not cast: a silent cast from int64 would give two different token ids one digest.
    if not isinstance(tokens, np.ndarray):
        raise InvalidArgumentError(f"tokens must be a one-dimensional int32 array, got a {type(tokens).__name__}")
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvalidArgumentError(
            f"tokens must be a one-dimensional int32 array, got {tokens.dtype} with shape {tokens.shape}"
        )
