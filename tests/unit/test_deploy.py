"""Everything in `deploy/`, judged by the tools that will read it and held against what the daemon has.

CI brings the tools (`.ci/run`) and fails without them; elsewhere a missing one is a skip that names it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import jsonschema
import kubernetes_validate
import msgspec
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from prefetchd.config import PREFIX, Settings
from prefetchd.metrics import NodeFigures, families

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd/prefetchd@.service"
MANIFEST = DEPLOY / "kubernetes/engine-with-prefetchd.yaml"
# The oldest release that keeps a sidecar's start-up order, and the newest whose schema is known.
KUBERNETES = ("1.29", "1.31")
# What Grafana must find to show a dashboard at all.
DASHBOARD = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time"],
    "properties": {
        "schemaVersion": {"type": "integer", "minimum": 36},
        "panels": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos", "targets", "datasource"],
                "properties": {
                    "type": {"enum": ["timeseries", "stat"]},
                    "gridPos": {
                        "type": "object",
                        "required": ["x", "y", "w", "h"],
                        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 100},
                    },
                    "targets": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "object", "required": ["refId", "expr", "legendFormat"]},
                    },
                },
            },
        },
    },
}


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed")
    assert found is not None
    return found


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def documents() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = documents()["Deployment"]["spec"]["template"]["spec"]
    return found


def containers() -> tuple[dict[str, Any], dict[str, Any]]:
    """The daemon's and the engine's."""
    (daemon,), (engine,) = pod()["initContainers"], pod()["containers"]
    return daemon, engine


def verify(unit: str, folder: Path) -> str:
    """What systemd has to say against the unit, with programs and users of this machine in it."""
    program = shutil.which("true")
    assert program is not None
    path = folder / "prefetchd@root.service"
    path.write_text(unit.replace("/opt/engine/bin/prefetchd", program))
    result = run(tool("systemd-analyze"), "verify", "--man=no", str(path), cwd=folder)
    # Of other units of the machine it may complain as well.
    lines = [line for line in result.stderr.splitlines() if "prefetchd@" in line]
    return "\n".join(lines) or ("" if result.returncode == 0 else result.stderr)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert verify(UNIT.read_text(), tmp_path) == ""


def test_systemd_would_name_a_mistake_in_the_unit(tmp_path: Path) -> None:
    assert "WatchdogSecs" in verify(UNIT.read_text().replace("WatchdogSec=", "WatchdogSecs="), tmp_path)


def test_systemd_accepts_the_engines_drop_in(tmp_path: Path) -> None:
    folder = tmp_path / "prefetchd@root.service.d"
    folder.mkdir()
    text = (DEPLOY / "systemd/engine.conf").read_text()

    for content, said in ((text, ""), (text.replace("Environment=", "Environments="), "Environments")):
        (folder / "engine.conf").write_text(content)
        found = [line for line in verify(UNIT.read_text(), tmp_path).splitlines() if "engine.conf" in line]
        assert said in "".join(found)
        assert bool(said) == bool(found)


def test_the_unit_and_the_engines_drop_in_name_one_endpoint() -> None:
    unit, drop_in = UNIT.read_text(), (DEPLOY / "systemd/engine.conf").read_text()

    assert "PREFETCHD_ENDPOINT=ipc:///run/prefetchd-%i/daemon" in unit
    assert "PREFETCHD_ENDPOINT=ipc:///run/prefetchd-engine/daemon" in drop_in
    assert "Wants=prefetchd@engine.service" in drop_in
    assert "RuntimeDirectory=prefetchd-%i" in unit


def test_the_unit_stops_later_than_the_daemon_does_by_itself() -> None:
    found = re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)

    assert found is not None
    assert int(found[1]) > Settings().stop_timeout_s


@pytest.mark.parametrize("release", KUBERNETES)
def test_kubernetes_accepts_the_manifest(release: str) -> None:
    for document in documents().values():
        kubernetes_validate.validate(document, release, strict=True)


def test_a_mistake_in_the_manifest_would_be_found() -> None:
    broken = documents()["Deployment"]
    broken["spec"]["template"]["spec"]["initContainers"][0]["startupProb"] = {}

    with pytest.raises(kubernetes_validate.ValidationError, match="startupProb"):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)


def test_daemon_and_engine_share_image_environment_and_volumes() -> None:
    daemon, engine = containers()

    assert daemon["image"] == engine["image"]
    assert daemon["envFrom"] == engine["envFrom"] == [{"configMapRef": {"name": "engine-kernels"}}]
    assert daemon["volumeMounts"] == engine["volumeMounts"]
    # One user for both: neither container has one of its own.
    assert "runAsUser" in pod()["securityContext"]
    assert all("runAsUser" not in one.get("securityContext", {}) for one in containers())


def test_the_socket_and_every_cache_lie_on_a_shared_volume() -> None:
    environment = documents()["ConfigMap"]["data"]
    mounts = [mount["mountPath"] for mount in containers()[0]["volumeMounts"]]

    places = [value.removeprefix("ipc://") for value in environment.values() if "/" in value]
    assert len(places) == 4
    for place in places:
        assert any(place.startswith(f"{mount}/") for mount in mounts), place


def test_probes_ask_pages_that_the_daemon_has_at_a_port_that_is_reachable() -> None:
    daemon, _ = containers()
    (port,) = daemon["ports"]

    probes = {name: daemon[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert [probe["path"] for probe in probes.values()] == ["/ready", "/ready", "/healthz"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    environment = {entry["name"]: entry["value"] for entry in daemon["env"]}
    assert environment["PREFETCHD_METRICS"] == f"0.0.0.0:{port['containerPort']}"
    assert Settings().metrics.endswith(f":{port['containerPort']}")


def test_the_daemons_container_stays_and_gets_no_gpu() -> None:
    daemon, engine = containers()

    assert daemon["restartPolicy"] == "Always"
    assert "nvidia.com/gpu" not in daemon["resources"]["limits"]
    assert "nvidia.com/gpu" in engine["resources"]["limits"]


def test_each_setting_that_is_named_exists() -> None:
    known = {PREFIX + name.upper() for name in Settings.__struct_fields__} | {"PREFETCHD", "PREFETCHD_CONFIG"}
    texts = {path: path.read_text() for path in DEPLOY.rglob("*") if path.is_file()}

    for path, text in texts.items():
        assert set(re.findall(r"\bPREFETCHD(?:_[A-Z_]+)?\b", text)) <= known, path


def test_the_container_is_the_engines_image_and_installs_for_its_interpreter(tmp_path: Path) -> None:
    parser = DockerfileParser(str(tmp_path), fileobj=None)
    parser.content = (DEPLOY / "container/Dockerfile").read_text()

    steps = [(step["instruction"], step["value"]) for step in parser.structure]
    allowed = {"ARG", "FROM", "USER", "COPY", "RUN", "EXPOSE", "ENTRYPOINT", "CMD", "COMMENT"}
    assert {name for name, _ in steps} <= allowed
    assert [value.split()[0] for name, value in steps if name == "FROM"] == ["${ENGINE_IMAGE}"] * 2
    assert ("CMD", '["prefetchd", "serve"]') in steps
    for value in (value for name, value in steps if name == "RUN"):
        assert run("sh", "-n", "-c", value, cwd=tmp_path).returncode == 0, value
        assert "pip" not in value or "${PYTHON} -m pip" in value


def test_prometheus_accepts_configuration_and_rules() -> None:
    folder = DEPLOY / "prometheus"

    for command in (("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml")):
        result = run(tool("promtool"), *command, cwd=folder)
        assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_fires_on_what_it_is_for_and_not_on_health() -> None:
    folder = DEPLOY / "prometheus"

    result = run(tool("promtool"), "test", "rules", "alerts.test.yml", cwd=folder)

    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_been_seen_to_fire() -> None:
    folder = DEPLOY / "prometheus"
    rules = yaml.safe_load((folder / "alerts.yml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((folder / "alerts.test.yml").read_text())["tests"]

    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if "exp_alerts" in one}
    assert fired == {rule["alert"] for rule in rules}


def test_grafana_finds_all_that_a_dashboard_needs() -> None:
    dashboard = json.loads((DEPLOY / "grafana/prefetchd.json").read_text())

    jsonschema.validate(dashboard, DASHBOARD)
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)


def blank(kind: Any) -> Any:
    """An instance with nothing in it, whatever fields it has."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: blank(field.type) for field in msgspec.structs.fields(kind)})
    return (get_origin(kind) or kind)()


def exported() -> Iterator[str]:
    """The names that the daemon's page can hold."""
    endings = {"counter": ("_total",), "gauge": ("",), "summary": ("_sum", "_count")}
    for family in families(blank(NodeFigures)):
        yield from (family.name + ending for ending in endings[family.type])


@pytest.mark.parametrize(
    "file", ["prometheus/alerts.yml", "prometheus/alerts.test.yml", "grafana/prefetchd.json"]
)
def test_every_metric_that_is_asked_for_is_exported(file: str) -> None:
    asked = set(re.findall(r"\bprefetchd_[a-z_]+", (DEPLOY / file).read_text()))

    assert asked
    assert asked <= set(exported())
