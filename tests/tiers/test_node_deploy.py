"""What deploy/ has for nodes: their command lines are those of the program, and files agree with each other and the page."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from nodes import needs_linux

from kvpool.cli import build_app
from kvpool.terminal import parse_bytes
from kvpool.tiers.node.behind import CLOSE_SECONDS
from kvpool.tiers.node.settings import NodeSettings, read_node
from kvpool.tiers.settings import read_toml

yaml = pytest.importorskip("yaml")
pytestmark = needs_linux
ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "systemd" / "kvpool-node.service").read_text(encoding="utf-8")
DAEMON_SET = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "kvpool-node.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "node.md").read_text(encoding="utf-8")


def parsed(words: list[str]) -> dict[str, Any]:
    """What `kvpool node` makes of a command line; an unknown option or a wrong value raises."""
    command = typer.main.get_command(build_app(["node"])).commands["node"]  # type: ignore[attr-defined]
    return command.make_context("node", words).params  # type: ignore[no-any-return]


def test_given_the_unit_then_its_options_and_places_exist() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    words = shlex.split(line.replace("$KVPOOL_NODE_OPTIONS", "--policy adaptive --bytes 64GB"))
    wanted = parsed(words[2:])
    assert wanted["disk"] == f"/var/cache/{re.findall(r'CacheDirectory=(.*)', UNIT)[0]}"
    assert f"node:{wanted['name']}" in UNIT
    options = {name: wanted[name] for name in ("bytes", "disk", "policy", "metrics")}
    assert read_node(None, options).metrics == ("127.0.0.1", 9464)
    assert int(re.findall(r"TimeoutStopSec=(\d+)", UNIT)[0]) > 3 * CLOSE_SECONDS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_given_the_unit_then_systemd_understands_all_of_it(tmp_path: Path) -> None:
    unit = tmp_path / "kvpool-node.service"
    unit.write_text(UNIT.replace("/opt/kvpool/bin/kvpool", "/bin/true"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert "kvpool-node.service" not in found.stderr


def test_given_the_daemon_set_then_its_options_places_and_limits_agree() -> None:
    pod = DAEMON_SET["spec"]["template"]["spec"]
    (first,), (container,) = pod["initContainers"], pod["containers"]
    wanted = parsed([*container["command"][2:], *container["args"]])
    (mount,) = container["volumeMounts"]
    assert wanted["name"].startswith(mount["mountPath"] + "/")
    assert first["command"][-1] == wanted["name"]
    assert first["command"][3] == str(container["securityContext"]["runAsUser"])
    assert pod["volumes"][0]["hostPath"]["path"] == mount["mountPath"] == first["volumeMounts"][0]["mountPath"]
    _, port = read_node(None, {"bytes": wanted["bytes"], "metrics": wanted["metrics"]}).metrics or ("", 0)
    assert port == container["ports"][0]["containerPort"]
    assert parse_bytes(container["resources"]["limits"]["memory"] + "B", "limit") > parse_bytes(
        wanted["bytes"], "bytes"
    )


def test_given_the_page_then_its_command_lines_and_its_file_are_right(tmp_path: Path) -> None:
    lines = re.findall(r"^kvpool node\b([^#\n]*)", PAGE, re.MULTILINE)
    assert lines
    for line in lines:
        assert parsed(shlex.split(line))["bytes"]
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    file = tmp_path / "kvpool.toml"
    file.write_text(text)
    assert read_node(file, {}).bytes == 64 * 2**30
    assert set(read_toml(file)["node"]) == set(NodeSettings.__dataclass_fields__), "the page shows every setting"
