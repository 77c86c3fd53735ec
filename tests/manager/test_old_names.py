"""Spellings of earlier versions still work, and say what to write instead."""

from __future__ import annotations

import pytest

from kvpool.manager import MOVED
from managers import make_manager


@pytest.mark.parametrize("old", MOVED)
def test_given_an_old_spelling_then_it_is_the_new_one_and_warns(old: str) -> None:
    manager = make_manager()
    part, name = MOVED[old].split(".")
    with pytest.warns(DeprecationWarning, match=f"manager.{old} is now manager.{MOVED[old]}") as caught:
        found = getattr(manager, old)
    new = getattr(getattr(manager, part), name)
    assert (found == new) if old != "now" else found <= new
    assert caught[0].filename == __file__


def test_given_an_old_verb_then_it_does_the_same() -> None:
    manager = make_manager()
    manager.commit(manager.allocate("a", [1, 2, 3, 4, 5]))
    with pytest.warns(DeprecationWarning, match="manager.cache.pin"):
        pin = manager.pin([1, 2, 3, 4])  # type: ignore[attr-defined]
    assert manager.cache.is_pinned(pin)
