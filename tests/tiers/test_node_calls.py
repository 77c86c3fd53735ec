"""Each message between an engine and its node is lost in turn: what the tier said holds, and nobody keeps anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from nodes import MEGABYTE, needs_linux, node_folder, node_thread
from servers import eventually

from kvpool.testing import VALUE_BYTES, Written, key, load, store, value
from kvpool.tiers import KeyPattern, NodeTier, Outcome, Purged

pytestmark = needs_linux

if hasattr(os, "eventfd"):
    from kvpool.tiers.node.connection import Connection, LostNodeError
    from kvpool.tiers.node.server import NodeServer

DONE = [[Outcome.OK] * 2, [Outcome.OK], [Outcome.OK]]


class Fault:
    """Lets one use of a socket fail, before or after it was done. The first messages of a connection do not count."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int | None, error: Exception, *, is_done: bool) -> None:
        self.count = 0
        self.closed: list[Connection] = []
        honest, close = Connection._retried, Connection.close
        self._failed: Connection | None = None

        def retried(node: Connection, *arguments: Any) -> Any:
            assert node is not self._failed, "this connection is not to be used again"
            is_chosen = self.count == number
            self.count += 1
            if is_chosen:
                self._failed = node
                if is_done:
                    honest(node, *arguments)
                raise error
            return honest(node, *arguments)

        def closing(node: Connection) -> None:
            self.closed.append(node)
            close(node)

        patch.setattr(Connection, "_retried", retried)
        patch.setattr(Connection, "close", closing)

    @property
    def is_over(self) -> bool:
        """Whether a connection failed, and was closed."""
        return self._failed is not None and self._failed in self.closed


def use(tier: NodeTier) -> list[Any]:
    """Stores in three ways, and reads in three ways. What comes is right."""
    outcomes: list[Any] = [store(tier, [1, 2])]
    outcomes.append(tier.store_straight([key(3)], [VALUE_BYTES], Written([3])))
    for number in (1, 2, 3):
        (outcome,), (found,) = load(tier, [number])
        assert outcome != Outcome.OK or found == value(number)
    loan = tier.lend([key(1), key(9)], [VALUE_BYTES] * 2)
    if loan is not None:
        assert loan.outcomes in ([Outcome.OK, Outcome.MISS], [Outcome.MISS] * 2)
        assert [bytes(view) for view in loan.views] == [value(1) if loan.outcomes[0] == Outcome.OK else b"", b""]
        loan.release()
    assert set(tier.listed(timeout=60.0).sizes.values()) <= {VALUE_BYTES}
    assert tier.contains([key(number) for number in (1, 9)])[1] is False
    outcomes.append(tier.remove([key(2)]))
    return outcomes


def counted(folder: Path) -> int:
    """How often sockets are used if nothing fails."""
    with (
        node_thread(folder, MEGABYTE),
        NodeTier(f"node:{folder}?timeout=60") as tier,
        pytest.MonkeyPatch.context() as patch,
    ):
        fault = Fault(patch, None, Exception(), is_done=False)
        assert use(tier) == DONE
        assert tier.purge(KeyPattern()) == Purged(2, is_complete=True)
        return fault.count


def is_free(server: NodeServer) -> bool:
    """Whether the two connections of the tier are left, and have neither leases nor reservations."""
    clients = server.call(server.stats, 30)["clients"]
    return len(clients) <= 2 and not any(client["leased"] or client["reserved_bytes"] for client in clients)


@pytest.mark.quick("lost-False")
@pytest.mark.parametrize(("error", "is_done"), [("lost", False), ("late", True)])
def test_given_each_message_is_lost_once_then_what_the_tier_said_holds_and_nobody_keeps_anything(
    error: str, is_done: bool
) -> None:
    with node_folder() as folder:
        for number in range(counted(folder / "counted")):
            raised = LostNodeError("lost") if error == "lost" else TimeoutError()
            with (
                node_thread(folder / str(number), MEGABYTE) as server,
                NodeTier(f"node:{folder / str(number)}?timeout=60") as tier,
            ):
                with pytest.MonkeyPatch.context() as patch:
                    fault = Fault(patch, number, raised, is_done=is_done)
                    (one, _), (three,), (removed,) = use(tier)
                    tier.purge(KeyPattern(bytes(8)))
                    assert fault.is_over
                tier._breaker.__init__()  # type: ignore[misc]  # the node is asked again at once
                kept = [is_there for is_there, said in ((1, one), (3, three)) if said == Outcome.OK]
                assert load(tier, kept) == ([Outcome.OK] * len(kept), [value(each) for each in kept])
                if removed == Outcome.OK:
                    assert tier.contains([key(2)]) == [False]
                assert store(tier, [1, 2, 3, 4]) == [Outcome.OK] * 4
                assert load(tier, [1, 2, 3, 4])[1] == [value(each) for each in (1, 2, 3, 4)]
                assert tier._num_lent == 0
                eventually(lambda: is_free(server), "nobody keeps anything")
                stats = server.call(server.stats, 30)
                assert sum(size["slots"] - size["free"] for size in stats["slots"]) == stats["num_values"] == 4
