"""What ships in deploy/: the dashboard asks for metrics that exist, units and manifests for options and paths that exist."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
from live import Live

from kvpool.cli import main
from kvpool.server.serve_command import GRACE_SECONDS

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvpool.json").read_text(encoding="utf-8"))
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvpool.yaml").read_text(encoding="utf-8")))
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def got(live: Live, path: str) -> str:
    with urllib.request.urlopen(live.url + path, timeout=30) as answer:
        return str(answer.read().decode())


def test_given_the_dashboard_then_every_metric_in_it_is_in_metrics(live: Live) -> None:
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", got(live, "/metrics"), re.M)
    known = {name + part for name, kind in kinds for part in _PARTS[kind]}
    asked = set(re.findall(r"kvpool_\w+", " ".join(target["expr"] for p in DASHBOARD["panels"] for target in p["targets"])))
    assert len(asked) > 12
    assert asked <= known


def test_given_the_dashboard_then_no_panels_overlap_and_each_has_an_id() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize(
    "file", [*DEPLOY.glob("Dockerfile*"), DEPLOY / "systemd" / "kvpool.service"], ids=lambda file: str(file.name)
)
def test_given_a_command_line_then_its_options_are_those_of_serve(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in file.read_text().splitlines() if line.startswith(("ENTRYPOINT", "ExecStart="))]
    assert set(re.findall(r"--[a-z-]+", line)) <= _options(capsys)


def test_given_the_manifest_then_its_options_and_probes_exist(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    (pod,) = [each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment"]
    (container,) = pod["containers"]
    assert {word for word in container["args"] if word.startswith("--")} <= _options(capsys)
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert got(live, container[probe]["httpGet"]["path"])
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


def test_given_grace_periods_then_they_are_longer_than_the_servers() -> None:
    (pod,) = [each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment"]
    unit = (DEPLOY / "systemd" / "kvpool.service").read_text()
    assert pod["terminationGracePeriodSeconds"] > GRACE_SECONDS
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > GRACE_SECONDS


def _options(capsys: pytest.CaptureFixture[str]) -> set[str]:
    main(["serve", "--help"])
    return set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
