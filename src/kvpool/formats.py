"""What is said of a file or message whose format is another than this kvpool reads. docs/formats.md lists all formats."""

from __future__ import annotations

from kvpool.checks import show


def other_format(found: object, oldest: int, newest: int, older_remedy: str) -> str | None:
    """The rest of a sentence about something of format `found`; None if it can be read, from `oldest` to `newest`.

    >>> other_format(7, 1, 3, "make it again")
    'has format 7; this kvpool reads 1 to 3: update kvpool'
    >>> other_format(0, 1, 1, "make it again")
    'has format 0; this kvpool reads 1: make it again'
    """
    if isinstance(found, bool) or not isinstance(found, int):
        return f"has format {show(found)}, which is no whole number"
    if oldest <= found <= newest:
        return None
    known = str(newest) if oldest == newest else f"{oldest} to {newest}"
    return f"has format {found}; this kvpool reads {known}: {'update kvpool' if found > newest else older_remedy}"
