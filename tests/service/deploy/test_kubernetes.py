"""The manifests of deploy/kubernetes: valid by the API's schemas, and right for the service that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from runtime_svc.settings import parse_settings
from targets.registry import TARGETS
from tests.repository import ROOT
from tests.service.deploy.compose_file import COMPOSE, resolve

FILES = sorted((ROOT / "deploy/kubernetes").glob("*.yml"))
#: Of Kubernetes.
RELEASES = ["1.35", "1.37"]
#: What Neuron's device plugin calls whole devices.
DEVICES = "aws.amazon.com/neuron"
#: Physical cores of one trn2 device, by AWS's documents.
CORES_PER_DEVICE = 8


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture
def deployment() -> dict[str, Any]:
    documents = read(ROOT / "deploy/kubernetes/runtime-neuron.yml")
    (found,) = (one for one in documents if one["kind"] == "Deployment")
    return found


@pytest.fixture
def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_schemas_accept_it(path: Path, release: str) -> None:
    for document in read(path):
        kubernetes_validate.validate(document, release, strict=True)


def test_the_schemas_are_strict(deployment: dict[str, Any]) -> None:
    deployment["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="container"):
        kubernetes_validate.validate(deployment, RELEASES[-1], strict=True)


def test_the_runtime_takes_its_arguments(container: dict[str, Any]) -> None:
    settings = parse_settings(container["args"])
    assert settings.target == "trn2"
    assert settings.edge.requires_principal
    assert settings.edge.tls is not None
    port = int(settings.edge.address.rpartition(":")[2])
    assert [one["containerPort"] for one in container["ports"]] == [port]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"][-1] == f"localhost:{port}"


def test_it_asks_for_the_devices_of_its_cores(container: dict[str, Any]) -> None:
    settings = parse_settings(container["args"])
    devices = container["resources"]["limits"][DEVICES]
    assert settings.num_cores == devices * CORES_PER_DEVICE // TARGETS[settings.target].logical_core_size


def test_what_it_reads_and_writes_is_mounted(container: dict[str, Any]) -> None:
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    paths = {word.partition("=")[2] for word in container["args"] if "=/" in word}
    assert [path for path in paths if not any(Path(path).is_relative_to(mount) for mount in mounts)] == []
    settings = parse_settings(container["args"])
    assert not mounts[str(settings.cache)]
    assert mounts["/bundles"]


def test_image_user_and_time_to_drain_are_those_of_compose(
    deployment: dict[str, Any], container: dict[str, Any]
) -> None:
    service = resolve(COMPOSE, COMPOSE_PROFILES="neuron")["services"]["runtime-neuron"]
    pod = deployment["spec"]["template"]["spec"]
    assert container["image"] == service["image"]
    assert f"{pod['terminationGracePeriodSeconds']}s" == service["stop_grace_period"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["capabilities"] == {"drop": service["cap_drop"]}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (service_document,) = (one for one in read(FILES[0]) if one["kind"] == "Service")
    assert service_document["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
