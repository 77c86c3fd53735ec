"""Multimodal items as the model of the wild machine sees them: codes.

A code is a token together with everything that makes its keys and values differ from those of the same token elsewhere:
codes below `FIRST` are tokens of text, the others say of which kind of item they are a placeholder, and which one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvpool import MultimodalItem
from kvpool.pools.symbols import Symbols, is_first

FIRST = 1000
KINDS: tuple[tuple[str | bytes | int, int], ...] = (
    *(("cat", 1), ("cat", 3), ("dog", 3), (b"dog", 2), (7, 5), ("cat", 9), ("7", 5)),
)


def code_of(kind: int, offset: int, token: int) -> int:
    return FIRST + (kind * 16 + offset) * 8 + token


def raw(code: int) -> int:
    """The token that the manager is told."""
    return code if code < FIRST else (code - FIRST) % 8


def place(code: int) -> tuple[int, int] | None:
    """The kind of item that a code belongs to, and its offset there."""
    return None if code < FIRST else divmod((code - FIRST) // 8, 16)


def following(code: int, token: int) -> int | None:
    """The code of `token` right behind `code`, if that leaves an item unfinished."""
    found = place(code)
    if found is None or found[1] + 1 == KINDS[found[0]][1]:
        return None
    return code_of(found[0], found[1] + 1, token)


def whole_items(codes: Sequence[int]) -> list[MultimodalItem]:
    """The items that lie among these codes from their first placeholder to their last."""
    items, at = [], 0
    while at < len(codes):
        length = 1
        found = place(codes[at])
        if found is not None and found[1] == 0:
            key, wanted = KINDS[found[0]]
            places = [place(code) for code in codes[at : at + wanted]]
            if places == [(found[0], offset) for offset in range(wanted)]:
                items.append(MultimodalItem(at, wanted, key))
                length = wanted
        at += length
    return items


def tellable(codes: Sequence[int]) -> list[int]:
    """The codes of a prompt that can be told: what is left of an item that does not lie in it as a whole becomes text."""
    covered = {at for item in whole_items(codes) for at in range(item.position, item.position + item.length)}
    return [code if at in covered else raw(code) for at, code in enumerate(codes)]


def told(codes: Sequence[int], name: str = "tokens") -> dict[str, Any]:
    """How a manager is told a prompt."""
    return {name: [raw(code) for code in codes], "multimodal": whole_items(codes) or None}


def codes_of(symbols: Symbols, ids: Any, before: int) -> list[int]:
    """What rows and nodes hold as codes; `before` is the code in front of them."""
    codes = []
    for symbol, begins in zip(ids.tolist(), is_first(ids).tolist(), strict=True):
        if symbol >= 0:
            before = symbol
        else:
            key, length, token = symbols.placeholder(symbol)
            kind = next(i for i, known in enumerate(KINDS) if known == (key, length) and type(known[0]) is type(key))
            if begins:
                before = code_of(kind, 0, token)
            else:
                assert (place(before) or [None])[0] == kind, "an item without its first placeholder"
                code = following(before, token)
                assert code is not None, "an item with too many placeholders"
                before = code
        codes.append(before)
    return codes


def items_of_run(codes: Iterable[int]) -> list[MultimodalItem]:
    """The items that some of these codes are placeholders of, also where the first one lies before them."""
    items: list[MultimodalItem] = []
    for at, code in enumerate(codes):
        found = place(code)
        if found is not None and (found[1] == 0 or at == 0):
            key, length = KINDS[found[0]]
            items.append(MultimodalItem(at - found[1], length, key))
    return items


def as_array(codes: Sequence[int]) -> Any:
    return np.array(codes, np.int32)
