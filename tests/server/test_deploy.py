"""What ships in deploy/ and stands in the docs: the dashboard asks for metrics that exist, command lines are those of the
program, and files agree with each other on ports, users, paths and packages.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from live import Live

from kvpool.cli import build_app
from kvpool.server.running import GRACE_SECONDS

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "kvpool.json").read_text(encoding="utf-8"))
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kvpool.yaml").read_text(encoding="utf-8")))
UNIT = (DEPLOY / "systemd" / "kvpool.service").read_text()
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
_PARTS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def got(live: Live, path: str) -> str:
    with urllib.request.urlopen(live.url + path, timeout=30) as answer:
        return str(answer.read().decode())


def test_given_the_dashboard_then_every_metric_in_it_is_in_metrics(live: Live) -> None:
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", got(live, "/metrics"), re.M)
    known = {name + part for name, kind in kinds for part in _PARTS[kind]}
    asked = set(
        re.findall(r"kvpool_\w+", " ".join(target["expr"] for p in DASHBOARD["panels"] for target in p["targets"]))
    )
    assert len(asked) > 12
    assert asked <= known


def test_given_the_dashboard_then_no_panels_overlap_and_each_has_an_id() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def parsed(words: Sequence[str], name: str = "serve") -> dict[str, Any]:
    """What `kvpool serve` makes of a command line; an unknown option or a wrong value raises."""
    command = typer.main.get_command(build_app([name]))
    return command.commands[name].make_context(name, list(words)).params  # type: ignore[attr-defined, no-any-return]


def pod() -> Any:
    (found,) = [each["spec"]["template"]["spec"] for each in MANIFESTS if each["kind"] == "Deployment"]
    return found


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with what follows it."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", file.read_text(), flags=re.M)).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def entrypoint(file: Path) -> list[str]:
    (line,) = [rest for name, rest in instructions(file) if name == "ENTRYPOINT"]
    words: list[str] = json.loads(line)
    return words


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.name))
def test_given_a_dockerfile_then_it_starts_what_it_installs_as_a_user_of_its_own(file: Path) -> None:
    told = dict(instructions(file))
    wanted = parsed(entrypoint(file)[2:])
    assert entrypoint(file)[:2] == ["kvpool", "serve"]
    assert f"127.0.0.1:{wanted['port']}/health" in told["HEALTHCHECK"]
    assert told["EXPOSE"] == str(wanted["port"])
    assert int(told["USER"]) == pod()["securityContext"]["runAsUser"] > 0
    assert re.search(r":\d", told["FROM"]), "an image without a version changes by itself"
    copied = {word for name, rest in instructions(file) if name == "COPY" for word in rest.split()[:-1]}
    assert all((DEPLOY.parent / name).exists() for name in copied)
    extras = re.findall(r"'\.\[([\w,]+)\]'", file.read_text())[0].split(",")
    assert set(extras) <= set(re.findall(r"^(\w+) = \[", (DEPLOY.parent / "pyproject.toml").read_text(), re.M))
    steps = " ".join(rest for name, rest in instructions(file) if name == "RUN")
    assert "--no-cache-dir" in steps
    assert ("apt-get" in steps) == ("rm -rf /var/lib/apt/lists" in steps)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.name))
def test_given_a_dockerfile_then_its_build_fails_unless_the_image_has_attention_in_c(file: Path) -> None:
    (steps,) = [rest for name, rest in instructions(file) if name == "RUN" and "pip install" in rest]
    commands = [command.strip() for command in steps.split("&&")]
    (installs,) = [number for number, command in enumerate(commands) if "pip install" in command]
    assert "KVPOOL_COMPILE=1 " in commands[installs]
    assert commands[-4] == 'python -c "import kvpool.kernels._paged_attention"'
    assert installs < len(commands) - 4


def test_given_uvicorn_whose_inside_is_used_then_only_versions_that_were_run_are_installed() -> None:
    major, minor = map(int, version("uvicorn").split(".")[:2])
    wanted = re.findall(r'"uvicorn([^"]*)"', (DEPLOY.parent / "pyproject.toml").read_text())
    assert wanted == [f">=0.30,<{major}.{minor + 1}"] * 2


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint: `make test-api` installs it")
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: str(file.name))
def test_given_a_dockerfile_then_hadolint_finds_nothing(file: Path) -> None:
    found = subprocess.run([str(HADOLINT), str(file)], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, "")


def test_given_the_unit_then_its_command_line_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"^ExecStart=\S+/kvpool serve (.*)$", UNIT, re.M)
    words = (
        line.replace("${KVPOOL_MODEL}", "/srv/models/m").replace("$KVPOOL_SERVE_OPTIONS", "--max-requests 9").split()
    )
    wanted = parsed(words)
    assert (wanted["model"], wanted["max_requests"], str(wanted["keys"])) == ("/srv/models/m", 9, "/etc/kvpool/keys")
    assert wanted["disk"] == f"/var/cache/{re.findall(r'CacheDirectory=(.*)', UNIT)[0]}"


def test_given_units_of_several_engines_then_the_router_knows_where_each_is_and_where_it_publishes() -> None:
    engine, route = ((DEPLOY / "systemd" / f"{name}.service").read_text() for name in ("kvpool@", "kvpool-route"))
    (line,) = re.findall(r"^ExecStart=\S+/kvpool serve (.*)$", engine, re.M)
    line = line.replace("${KVPOOL_MODEL}", "/srv/models/m").replace("$KVPOOL_SERVE_OPTIONS", "")
    engines = [parsed(line.replace("%i", number).split()) for number in "01"]
    (asked,) = re.findall(r"^ExecStart=\S+/kvpool route (.*)$", route, re.M)
    assert parsed(asked.split(), "route")["backend"] == [
        f"http://127.0.0.1:{each['port']}={each['publish']}" for each in engines
    ]
    assert len({each["disk"] for each in engines}) == 2


def test_given_the_manifest_of_several_engines_then_its_options_exist_and_ports_agree() -> None:
    file = DEPLOY / "kubernetes" / "kvpool-route.yaml"
    found = {each["kind"]: each["spec"] for each in yaml.safe_load_all(file.read_text()) if "replicas" in each["spec"]}
    (engine,) = found["StatefulSet"]["template"]["spec"]["containers"]
    (route,) = found["Deployment"]["template"]["spec"]["containers"]
    wanted = parsed([*entrypoint(DEPLOY / "Dockerfile.cuda")[2:], *engine["args"]])
    events = int(wanted["publish"].rpartition(":")[2])
    assert [each["containerPort"] for each in engine["ports"]] == [wanted["port"], events, events + 1]
    asked = parsed(route["args"], "route")
    name = found["StatefulSet"]["serviceName"]
    assert asked["backend"] == [
        f"http://kvpool-{number}.{name}:{wanted['port']}=tcp://kvpool-{number}.{name}:{events}"
        for number in range(found["StatefulSet"]["replicas"])
    ]
    assert asked["port"] == route["ports"][0]["containerPort"]
    steps = (DEPLOY / "Dockerfile.cuda").read_text()
    assert "cluster" in re.findall(r"'\.\[([\w,]+)\]'", steps)[0].split(",")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_given_the_unit_then_systemd_understands_all_of_it(tmp_path: Path) -> None:
    unit = tmp_path / "kvpool.service"
    unit.write_text(UNIT.replace("/opt/kvpool/bin/kvpool", "/bin/true"))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert "kvpool.service" not in found.stderr


def test_given_the_manifest_then_its_options_probes_and_places_exist(live: Live) -> None:
    (container,) = pod()["containers"]
    wanted = parsed([*entrypoint(DEPLOY / "Dockerfile.cuda")[2:], *container["args"]])
    assert wanted["port"] == container["ports"][0]["containerPort"]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert got(live, container[probe]["httpGet"]["path"])
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounted) == {each["name"] for each in pod()["volumes"]}
    assert wanted["model"].startswith(mounted["models"])
    assert wanted["disk"] == mounted["cache"]
    assert str(wanted["keys"]).startswith(mounted["keys"])
    claims = {each["metadata"]["name"] for each in MANIFESTS if each["kind"] == "PersistentVolumeClaim"}
    claimed = [
        each["persistentVolumeClaim"]["claimName"] for each in pod()["volumes"] if "persistentVolumeClaim" in each
    ]
    assert set(claimed) == claims


def test_given_prometheus_configuration_then_it_reads_the_port_and_sends_a_key() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    assert "credentials_file" in job["authorization"]


@pytest.mark.parametrize("file", ["README.md", "docs/server.md", "docs/live-view.md", "docs/tiers.md"])
def test_given_the_docs_then_every_command_line_of_the_server_in_them_is_one(file: str) -> None:
    text = (DEPLOY.parent / file).read_text(encoding="utf-8")
    lines = re.findall(r"^kvpool serve\b([^#\n]*)", text, re.M)
    assert lines or file == "docs/tiers.md"
    for line in lines:
        parsed(shlex.split(line))


def test_given_grace_periods_then_they_are_longer_than_the_servers() -> None:
    assert pod()["terminationGracePeriodSeconds"] > GRACE_SECONDS
    assert int(re.findall(r"TimeoutStopSec=(\d+)", UNIT)[0]) > GRACE_SECONDS
