"""The Dockerfile and the Kubernetes manifest, as far as a machine without either can tell: they name what exists, and agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from hfax.cli.app import make_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {m["kind"]: m for m in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def options(manifests: dict[str, Any]) -> dict[str, Any]:
    """What `hfax serve` makes of the container's arguments."""
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    verb, *words = container["args"]
    verbs: Any = typer.main.get_command(make_app())
    return verbs.commands[verb].make_context(verb, words).params


def test_probes_ask_the_port_without_a_key(manifests: dict[str, Any], options: dict[str, Any]) -> None:
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {port["containerPort"] for port in container["ports"]} == {options["port"], options["health_port"]}
    asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in asked.values()} == {options["health_port"]}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }


def test_a_pod_ends_after_its_running_requests(manifests: dict[str, Any], options: dict[str, Any]) -> None:
    assert (
        manifests["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > options["drain_timeout"]
    )


def test_the_service_leads_to_the_api_and_its_volume_is_claimed(
    manifests: dict[str, Any], options: dict[str, Any]
) -> None:
    spec = manifests["Deployment"]["spec"]
    assert manifests["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert [port["targetPort"] for port in manifests["Service"]["spec"]["ports"]] == [options["port"]]
    (volume,) = spec["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == manifests["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_image_installs_what_there_is() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (names,) = re.findall(r"# EXTRA is ([^.]+)\.", lines)
    assert {*re.findall(r"\w+", names)} - {"or"} == {"cpu", "tpu", "cuda"} <= set(extras)
    assert '".[${EXTRA},serve]"' in lines
    assert re.findall(r"torch==[\d.]+", lines) == re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text())[:1]
    copied = [name for line in re.findall(r"^COPY (.+)$", lines, re.MULTILINE) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert 'ENTRYPOINT ["hfax"]' in lines
