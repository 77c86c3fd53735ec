"""The whole manager in drawn settings, compared with a byte-exact model after every operation. More: `make fuzz`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from byte_model import Bytes, Sessions
from wild_configs import draw_setting
from wild_runs import reduced, report, run

from kvpool import GroupKind, Tier
from kvpool.eviction import make_policy, policy_names
from kvpool.pools.pool import CopyKind

NUM_OPERATIONS = 80
SEEDS = range(70)


@pytest.mark.quick("0")
@pytest.mark.parametrize("first", range(0, len(SEEDS), 10))
def test_given_random_operations_in_wild_settings_then_every_table_reads_its_tokens(first: int) -> None:
    for seed in SEEDS[first : first + 10]:
        if failure := run(seed, range(NUM_OPERATIONS)):
            pytest.fail(report(reduced(failure)), pytrace=False)


def test_settings_cover_what_is_allowed() -> None:
    settings = [draw_setting(Random(f"setting {seed}")) for seed in range(400)]
    configs = [setting.config for setting in settings]
    ours = {name for name in policy_names() if type(make_policy(name)).__module__.startswith("kvpool.")}
    assert {config.eviction_policy for config in configs} == ours
    assert {config.host_write for config in configs if config.num_blocks(Tier.HOST)} == {"back", "through"}
    assert {group.kind for config in configs for group in config.groups} == set(GroupKind)
    assert any(len(config.pools) > 2 for config in configs)
    assert any(len(config.groups) == 5 for config in configs)
    assert {(setting.listens, setting.records) for setting in settings} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert any(len([g for g in config.groups if g.window and g.pool == 0]) > 1 for config in configs), (
        "windows in one pool"
    )
    assert any(len({p.num_blocks[Tier.HOST] for p in config.pools}) > 1 for config in configs), "unequal host pools"
    assert any(num_blocks == 0 for setting in settings for _, _, num_blocks in setting.cuts), "a tier without one pool"


def test_what_a_session_computed_is_stale_once_it_was_invalidated_and_so_is_what_was_computed_from_it() -> None:
    sessions = Sessions()
    first, other = sessions.now("s"), sessions.now("t")
    both = sessions.number(first | other)
    assert sessions.stale([both, 0]) == []
    sessions.invalidate("s")
    assert sessions.stale([both, 0]) == [("s", 0)]
    assert sessions.stale([sessions.number(sessions.now("s")), sessions.number(sessions.now(None))]) == []


@pytest.mark.slow
def test_the_long_run_shares_its_numbers_between_processes() -> None:
    long_run = Path(__file__).with_name("long_run.py")
    command = [sys.executable, str(long_run), "--seed", "3", "--operations", "40", "--length", "10", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 3: numbers 3000000 to 3000003, 2 processes" in done.stdout
    assert "seed 3: 40 operations in 4 settings, 0 failures" in done.stdout


class LosesCopies(Bytes):
    """A data plane that forgets copies of one kind."""

    kind: CopyKind

    def run(self, copies: Any) -> None:
        super().run(op for op in copies if op.kind is not self.kind)


@pytest.mark.quick("copy_on_write", "partial_reuse", "swap_out", "offload", "onboard", "defragment")
@pytest.mark.parametrize("kind", CopyKind)
def test_given_a_data_plane_that_forgets_copies_then_the_machine_notices(
    kind: CopyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wild_machine.Bytes", LosesCopies)
    monkeypatch.setattr(LosesCopies, "kind", kind, raising=False)
    failures = (run(seed, range(NUM_OPERATIONS), check_every=8) for seed in range(4 * len(SEEDS)))
    failure = next(found for found in failures if found is not None)
    assert "wrong bytes" in failure.error


@pytest.mark.slow
def test_a_failed_run_is_reduced_to_the_operations_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wild_machine.Bytes", LosesCopies)
    monkeypatch.setattr(LosesCopies, "kind", CopyKind.COPY_ON_WRITE, raising=False)
    failure = next(found for seed in SEEDS if (found := run(seed, range(NUM_OPERATIONS))) is not None)
    short = reduced(failure)
    assert len(short.numbers) < len(failure.numbers)
    assert run(short.seed, short.numbers).error == short.error
    assert "m.allocate(" in report(short)
