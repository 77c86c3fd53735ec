"""How a number of bytes is divided between pools: what cached prefixes and running sequences need of each.

Full-attention groups keep every block of a prefix; windowed groups need its last window, and without that window the
full-attention blocks are worth nothing. So bytes go to pools in proportion to what one typical prefix needs in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.config.layers import GroupKind, LayerGroup, ceil_div, divide_budget

PREFIX_TOKENS = 2048  # a typical prefix: system prompt and some turns


def prefix_needs(groups: Sequence[LayerGroup], num_tokens: int, cross_tokens: int, is_written: bool) -> list[int]:
    """Blocks per pool that a typical prefix of `num_tokens` keeps.

    Where prefixes are also written (`is_written`: on the GPU), a windowed group needs its last window while the prefix is
    cached, and all of its blocks while the prompt is written in one piece: the budget plans for the middle of both.
    """
    needs = [0] * (1 + max(group.pool for group in groups))
    for group in groups:
        if group.kind is GroupKind.CROSS:
            need = group.max_live_blocks(cross_tokens)
        else:
            need = group.max_live_blocks(num_tokens)
            if is_written:
                need = ceil_div(need + ceil_div(num_tokens, group.block_size), 2)
        needs[group.pool] += need
    return needs


def divide_for_prefixes(
    num_bytes: int,
    block_bytes: Sequence[int],
    prefix: Sequence[int],
    longest: Sequence[int] | None,
    minimums: Sequence[int],
) -> tuple[int, ...]:
    """Blocks per pool: those of one `longest` sequence first, if given, and the rest in proportion to a `prefix`.

    A budget that does not hold the longest sequence is divided as that sequence needs it.
    """
    if longest is None:
        return divide_budget(num_bytes, block_bytes, prefix, minimums)
    first = [max(need, least) for need, least in zip(longest, minimums, strict=True)]
    rest = num_bytes - sum(count * size for count, size in zip(first, block_bytes, strict=True))
    if rest < 0:
        return divide_budget(num_bytes, block_bytes, longest, minimums)
    more = divide_budget(rest, block_bytes, prefix, [0] * len(first))
    return tuple(a + b for a, b in zip(first, more, strict=True))


def divide_by_shares(
    num_bytes: int, block_bytes: Sequence[int], shares: Sequence[float], minimums: Sequence[int]
) -> tuple[int, ...]:
    """Blocks per pool where pool i takes the fraction `shares[i]` of the bytes, but never less than its minimum."""
    weights = [round(share * 2**40 / size) for share, size in zip(shares, block_bytes, strict=True)]
    return divide_budget(num_bytes, block_bytes, weights, minimums)
