"""Digests behind forgotten ones become other keys, whatever was forgotten before or after; what is known can be taken out."""

from __future__ import annotations

import pytest

from kvpool.tiers.transport.block_keys import Forgotten, Lineage

ROOT, OTHER_ROOT, A, B, C, D = (bytes([number]) * 32 for number in range(6))
PATH = [A, B, C]


def used(forgotten: Forgotten, root: bytes = ROOT, path: list[bytes] = PATH) -> list[bytes]:
    return list(forgotten.renamed(forgotten.salt_of(root), path)[0])


def test_given_nothing_forgotten_then_digests_are_what_they_are() -> None:
    forgotten = Forgotten()
    assert used(forgotten) == PATH
    assert forgotten.version == 0


def test_given_a_forgotten_block_then_it_and_what_follows_are_renamed_and_what_comes_before_is_not() -> None:
    forgotten = Forgotten()
    forgotten.forget([B])
    first, second, third = used(forgotten)
    assert first == A
    assert second != B
    assert third != C
    assert used(forgotten, path=[A, D]) == [A, D]
    assert used(forgotten) == [first, second, third]  # the same from now on
    assert forgotten.version == 1


def test_given_a_path_in_pieces_then_names_are_those_of_the_whole() -> None:
    forgotten = Forgotten()
    forgotten.forget([A])
    forgotten.forget([C])
    salt, names = forgotten.salt_of(ROOT), []
    for digest in PATH:
        piece, salt = forgotten.renamed(salt, [digest])
        names += piece
    assert names == used(forgotten)


def test_given_a_forgotten_scope_then_all_of_it_is_renamed_and_others_are_not() -> None:
    forgotten = Forgotten()
    forgotten.forget([ROOT])
    assert not set(used(forgotten)) & set(PATH)
    assert used(forgotten, OTHER_ROOT, [D]) == [D]


def test_given_a_forgotten_tenant_then_every_root_of_it_is_renamed_also_one_that_was_forgotten_by_itself() -> None:
    forgotten, tenant = Forgotten(), b"t" * 32
    forgotten.forget([ROOT])
    alone = forgotten.salt_of(tenant, ROOT)
    forgotten.forget([tenant])
    salts = [forgotten.salt_of(tenant, root) for root in (ROOT, OTHER_ROOT)]
    assert len({alone, None, *salts}) == 4
    assert forgotten.salt_of(b"u" * 32, OTHER_ROOT) is None


@pytest.mark.parametrize("later", [[ROOT], [A], [B], None])
def test_given_something_forgotten_before_when_more_above_it_is_forgotten_then_nothing_of_it_keeps_its_name(
    later: list[bytes] | None,
) -> None:
    forgotten = Forgotten()
    forgotten.forget([B])
    before = used(forgotten)
    forgotten.forget_all() if later is None else forgotten.forget(later)
    assert not set(used(forgotten)[1:]) & {*before[1:], *PATH}


def test_given_something_that_is_forgotten_then_the_version_is_one_that_never_was() -> None:
    forgotten, versions = Forgotten(limit=2), [0]
    for forget in (forgotten.forget_all, lambda: forgotten.forget([A]), forgotten.forget_all, forgotten.forget_all):
        forget()
        versions.append(forgotten.version)
    forgotten.forget([A, B, C])
    assert sorted({*versions, forgotten.version}) == [*versions, forgotten.version]


def test_given_as_many_forgotten_blocks_as_are_remembered_then_nothing_else_is_forgotten() -> None:
    forgotten = Forgotten(limit=2)
    forgotten.forget([C, D])
    assert used(forgotten)[: PATH.index(C)] == list(PATH[: PATH.index(C)])
    assert forgotten.version == 1


def test_given_more_forgotten_blocks_than_are_remembered_then_everything_is_forgotten_and_nothing_comes_back() -> None:
    forgotten = Forgotten(limit=2)
    seen = {*PATH}
    for digest in (A, B, C, D):
        forgotten.forget([digest])
        assert not {*used(forgotten)[2:]} & seen if digest == C else True
    assert not set(used(forgotten)) & set(PATH)


def lineage(limit: int = 100) -> Lineage:
    made = Lineage(limit)
    made.note(ROOT, [A, B], [A, B])
    made.note(B, [C], [b"renamed"])
    made.note(A, [D], [D])
    return made


@pytest.mark.parametrize(
    ("marks", "gone"),
    [
        ([B], {B, b"renamed"}),
        ([A], {A, B, b"renamed", D}),
        ([ROOT], {A, B, b"renamed", D}),
        ([C, B], {B, b"renamed"}),
        ([], set()),
        ([OTHER_ROOT], set()),
        (None, {A, B, b"renamed", D}),
    ],
)
def test_given_blocks_that_follow_each_other_then_all_below_a_mark_are_taken_as_they_were_renamed(
    marks: list[bytes] | None, gone: set[bytes]
) -> None:
    made = lineage()
    assert set(made.take(marks)) == gone
    assert set(made.take(marks)) == set()
    assert len(made) == 4 - len(gone)


def test_given_more_blocks_than_are_known_then_the_oldest_are_not_known_any_more() -> None:
    made = lineage(limit=2)
    assert len(made) == 2
    assert set(made.take(None)) == {b"renamed", D}


def test_given_sessions_then_their_beginnings_are_known_up_to_a_limit() -> None:
    made = Lineage(limit=2)
    made.begin("one", A)
    made.begin("one", A)
    made.begin("one", B)
    assert made.of_session("one") == [A, B]
    made.begin("two", C)
    assert (made.of_session("one"), made.of_session("two"), made.of_session("none")) == ([], [C], [])


def test_given_as_many_beginnings_as_the_limit_then_all_sessions_are_known_and_the_oldest_goes_with_the_next() -> None:
    made = Lineage(limit=3)
    made.begin("one", A)
    made.begin("two", B)
    made.begin("three", C)
    made.begin("one", A)  # again: it is no longer the oldest
    assert [made.of_session(name) for name in ("one", "two", "three")] == [[A], [B], [C]]
    made.begin("four", D)
    assert [made.of_session(name) for name in ("one", "two", "three", "four")] == [[A], [], [C], [D]]
    made.begin("five", B)
    assert [made.of_session(name) for name in ("one", "three", "four", "five")] == [[A], [], [D], [B]]


def test_given_one_session_with_more_blocks_than_are_known_then_it_is_not_forgotten() -> None:
    lineage = Lineage(2)
    digests = [bytes([number]) * 32 for number in range(4)]
    for digest in (*digests, digests[0]):
        lineage.begin("long", digest)
    assert lineage.of_session("long") == digests
    lineage.begin("other", digests[0])
    assert (lineage.of_session("long"), lineage.of_session("other")) == ([], digests[:1])


def test_given_blocks_of_a_path_then_the_sessions_that_computed_some_of_them_are_known_while_the_session_is() -> None:
    lineage = Lineage(3)
    assert not lineage.has_sessions
    lineage.begin("one", B)
    lineage.begin("two", A)
    lineage.begin("two", B)
    assert lineage.has_sessions
    assert lineage.sessions_of([A, B, C]) == ("two", "one")
    assert lineage.sessions_of([B, C]) == ("one", "two")
    assert lineage.sessions_of([ROOT, C]) == ()
    lineage.begin("three", C)  # the session of which nothing came for longest is forgotten
    assert lineage.sessions_of([A, B, C]) == ("two", "three")
    lineage.begin("three", D)
    lineage.begin("three", ROOT)
    assert lineage.sessions_of([ROOT, A, B, C, D]) == ("three",)
