"""The Mooncake tier, in a network namespace of its own: Mooncake listens on all interfaces and asks nobody for a password.

The tests are in `mooncake_inside.py`; this one runs them where only loopback exists, and says why where it cannot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = Path(__file__).with_name("mooncake_inside.py")


def namespace_command() -> list[str]:
    """What a command begins with to run with a loopback and no other network."""
    if missing := [program for program in ("unshare", "ip") if shutil.which(program) is None]:
        pytest.skip(f"needs a network namespace, and there is no program {missing[0]}")
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *as_root, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"needs a network namespace, which this machine refuses: {tried.stderr.strip()}")
    return command


@pytest.mark.slow
def test_given_a_namespace_of_its_own_then_the_mooncake_tier_keeps_the_contract_and_survives_faults() -> None:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"needs Mooncake's client ({error}): pip install 'kvpool[mooncake]', apt-get install libibverbs1")
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(INSIDE)]
    found = subprocess.run([*namespace_command(), *tests], capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout
