"""An engine on a real Mooncake Store that loses a node; run by test_tiers_server_faults.py where there is only loopback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "tiers")]

from servers import MooncakeMaster, MooncakeNode, running
from tier_faults import assert_right, make_engine

NODE_BYTES = 64 << 20


@pytest.mark.parametrize("what", ["node", "master"])
def test_given_a_process_of_the_store_that_is_killed_then_requests_are_answered(what: str, tmp_path: Path) -> None:
    master = MooncakeMaster(tmp_path / "master")
    nodes = [MooncakeNode(tmp_path / f"node-{number}", master, NODE_BYTES) for number in range(2)]
    address = f"mooncake://127.0.0.1:{master.port}?hostname=127.0.0.1&timeout=5&pause=0.05"
    with running(master), running(nodes[0]), running(nodes[1]):
        with make_engine(remote=address, tier_timeout=60.0) as engine:
            assert_right(engine)
        with make_engine(remote=address, tier_timeout=60.0) as engine:
            assert assert_right(engine) > 0
            (nodes[0] if what == "node" else master).kill()
            for _ in range(2):
                engine.manager.cache.reset()
                assert_right(engine)
        with make_engine(remote=address, tier_timeout=5.0) as engine:
            assert_right(engine)
