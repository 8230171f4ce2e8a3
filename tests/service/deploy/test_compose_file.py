"""docker-compose.yml is valid for Docker Compose, and fits the services that it starts."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import dockerfile
import pytest

from compiler_svc.settings import parse_settings as parse_compiler
from edge.access.key_source import KeyFile
from edge.access.principal import Principal, Scope
from edge.access.token_verifier import TokenVerifier
from edge.config import TlsConfig
from runtime_svc.settings import parse_settings as parse_runtime
from tests.repository import ROOT
from tests.service.deploy.compose_file import COMPOSE, TLS, resolve, seconds

PARSERS = {"compiler": parse_compiler, "runtime": parse_runtime}
SERVICES = list(PARSERS)
NEURON_SERVICES = [f"{name}-neuron" for name in SERVICES]


def settings_of(name: str, service: dict[str, Any]) -> Any:
    """What a service, or the one for NeuronCores, makes of its arguments and its variables."""
    return PARSERS[name.removesuffix("-neuron")](service["command"], service.get("environment") or {})


@pytest.mark.parametrize("name", SERVICES)
def test_arguments_are_those_of_the_service(name: str) -> None:
    service = resolve(COMPOSE)["services"][name]
    settings = settings_of(name, service)
    port = int(settings.edge.address.rpartition(":")[2])
    assert settings.edge.host == "0.0.0.0"
    gateways = [50053] if name == "runtime" else []
    assert [published["target"] for published in service["ports"]] == [port, *gateways]
    assert {published["host_ip"] for published in service["ports"]} == {"127.0.0.1"}
    exposed = dockerfile.parse_file(str(ROOT / service["build"]["dockerfile"]))
    assert [command.value for command in exposed if command.cmd == "EXPOSE"] == [(str(port),)]
    assert service["healthcheck"]["test"][-1].endswith(f":{port}")
    assert seconds(service["stop_grace_period"]) >= settings.edge.drain_timeout_s + 10


def test_the_runtime_starts_when_the_compiler_is_healthy() -> None:
    services = resolve(COMPOSE)["services"]
    assert services["runtime"]["depends_on"]["compiler"] == {"condition": "service_healthy", "required": True}
    assert settings_of("runtime", services["runtime"]).compiler.address == "compiler:50051"


def test_the_store_is_shared_and_the_runtime_only_reads_it() -> None:
    services = resolve(COMPOSE)["services"]
    mounts = {
        (name, mount["source"]): (mount["target"], mount.get("read_only", False))
        for name in SERVICES
        for mount in services[name]["volumes"]
    }
    assert mounts["compiler", "store"] == (str(settings_of("compiler", services["compiler"]).store), False)
    assert mounts["runtime", "store"] == (str(settings_of("runtime", services["runtime"]).store), True)
    assert mounts["compiler", str(ROOT / "examples/models")] == ("/models", True)


def but(service: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in service.items() if key not in names}


def test_every_service_is_one_of_these() -> None:
    services = resolve(COMPOSE, COMPOSE_PROFILES="*")["services"]
    assert {name for name, service in services.items() if "ports" in service} == {*SERVICES, *NEURON_SERVICES}


@pytest.mark.parametrize("name", [*SERVICES, *NEURON_SERVICES])
def test_tls_changes_nothing_but_the_transport(name: str) -> None:
    plain = resolve(COMPOSE, COMPOSE_PROFILES="neuron")["services"][name]
    secured = resolve(COMPOSE, TLS, COMPOSE_PROFILES="neuron", KILN_CERTIFICATES="/certificates")["services"][name]
    about_tls = ("--tls-", "--compiler-ca", "--compiler-certificate", "--compiler-key", "--allow-")
    assert [word for word in secured["command"] if not word.startswith(about_tls)] == [
        word for word in plain["command"] if not word.startswith(about_tls)
    ]
    others = ("command", "healthcheck", "volumes")
    assert but(secured, *others) == but(plain, *others)
    settings = settings_of(name, secured)
    certificates = Path("/etc/kiln")
    role = name.removesuffix("-neuron")
    pair = (certificates / f"{role}.pem", certificates / f"{role}-key.pem")
    assert settings.edge.tls == TlsConfig(*pair, certificates / "ca.pem")
    assert not settings.edge.allow_insecure
    assert settings.edge.requires_principal
    if role == "runtime":
        endpoint = settings.compiler
        assert (endpoint.certificate_path, endpoint.key_path, endpoint.ca_path) == (*pair, certificates / "ca.pem")
    assert but(secured["healthcheck"], "test") == but(plain["healthcheck"], "test")
    assert "/certificates" in [mount["source"] for mount in secured["volumes"] if mount.get("read_only")]


def test_tls_needs_its_certificates() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        resolve(COMPOSE, TLS)
    assert "the directory of the certificates" in caught.value.stderr


@pytest.mark.parametrize("files", [(COMPOSE,), (COMPOSE, TLS)], ids=["plain", "tls"])
def test_the_issuer_makes_what_the_services_read(files: tuple[Path, ...], tmp_path: Path) -> None:
    """Its program runs here as it would there, with the places of its volumes moved."""
    services = resolve(*files, KILN_CERTIFICATES=str(tmp_path))["services"]
    issuer = services["issuer"]
    assert (issuer["network_mode"], issuer["cap_drop"]) == ("none", ["ALL"])
    places = {mount["target"]: tmp_path / mount["source"] for mount in issuer["volumes"]}
    for place in places.values():
        place.mkdir()

    def here(text: str) -> str:
        for target, place in places.items():
            text = text.replace(target, str(place))
        return text

    _, *words = [here(word) for word in (*issuer["entrypoint"], *issuer["command"])]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT)
    settings = {name: settings_of(name, services[name]) for name in SERVICES}
    for name in SERVICES:
        mounted = {mount["source"]: mount.get("read_only", False) for mount in services[name]["volumes"]}
        assert mounted["auth"]
        assert "keys" not in mounted, "what loads bundles must not sign tokens"
        assert settings[name].edge.requires_principal
        assert services[name]["depends_on"]["issuer"]["condition"] == "service_completed_successfully"
    token = Path(here(str(settings["runtime"].compiler.token_path))).read_text().strip()
    for name in SERVICES:
        access = settings[name].edge.access
        keys = KeyFile(Path(here(access.jwks)))
        verifier = TokenVerifier(keys, audience=access.audience, issuer=access.issuer, clock_skew_s=1)
        assert asyncio.run(verifier.verify(token)) == Principal("runtime", frozenset({Scope.LOAD}))


@pytest.mark.parametrize("name", SERVICES)
def test_everything_written_is_on_a_volume(name: str) -> None:
    service = resolve(COMPOSE)["services"][name]
    writable = [mount["target"] for mount in service["volumes"] if not mount.get("read_only")]
    words = " ".join(service["command"])
    written = [word.partition("=")[2].removeprefix("sqlite:///") for word in words.split() if "/var/lib/kiln" in word]
    read_only = [mount["target"] for mount in service["volumes"] if mount.get("read_only")]
    assert [path for path in written if not any(path.startswith(target) for target in (*writable, *read_only))] == []


@pytest.mark.parametrize("name", [*SERVICES, "gateway"])
def test_the_service_is_restarted_and_has_no_privileges(name: str) -> None:
    service = resolve(COMPOSE, COMPOSE_PROFILES="openai")["services"][name]
    assert (service["restart"], service["init"], service["cap_drop"]) == ("unless-stopped", True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"]


@pytest.mark.parametrize("files", [(COMPOSE,), (COMPOSE, TLS)], ids=["plain", "tls"])
def test_the_gateway_calls_the_runtimes_loopback_with_nothing_of_its_own(
    files: tuple[Path, ...], tmp_path: Path
) -> None:
    assert "gateway" not in resolve(COMPOSE)["services"], "most clients speak gRPC"
    services = resolve(*files, COMPOSE_PROFILES="openai", KILN_CERTIFICATES=str(tmp_path))["services"]
    gateway, runtime = services["gateway"], settings_of("runtime", services["runtime"])
    assert gateway["network_mode"] == "service:runtime"
    assert "environment" not in gateway
    options = dict(word.removeprefix("--").split("=", 1) for word in gateway["command"] if "=" in word)
    assert options["runtime"] == runtime.edge.local_listener.address
    assert options["port"] in [published["published"] for published in services["runtime"]["ports"]]
    certificate = None if runtime.edge.tls is None else str(runtime.edge.tls.certificate_path)
    assert options.get("tls-cert-path") == certificate
    (key,) = (word.partition("=")[2] for word in services["issuer"]["command"] if word.startswith("--api-key="))
    assert options["api-key-file"] == key
    mounts = {mount["target"]: mount.get("read_only", False) for mount in gateway["volumes"]}
    assert {target: mounts[target] for target in mounts if target != "/etc/kiln"} == {str(Path(key).parent): True}


class TestNeuron:
    """The profile `neuron`: both services once more, with Neuron's packages and devices."""

    def services(self, **variables: str) -> dict[str, Any]:
        services: dict[str, Any] = resolve(COMPOSE, COMPOSE_PROFILES="neuron", **variables)["services"]
        return services

    def test_they_start_only_when_they_are_asked_for(self) -> None:
        assert {*resolve(COMPOSE)["services"]} == {"issuer", *SERVICES}
        assert {*self.services()} == {"issuer", *SERVICES, *NEURON_SERVICES}

    @pytest.mark.parametrize("name", SERVICES)
    def test_they_differ_in_the_image_and_the_devices(self, name: str) -> None:
        services = self.services()
        plain, neuron = services[name], services[f"{name}-neuron"]
        others = ("image", "build", "profiles", "environment", "devices", "depends_on")
        assert but(neuron, *others) == but(plain, *others)
        assert neuron["build"]["additional_contexts"] == {plain["image"]: f"service:{name}"}
        assert neuron["build"]["dockerfile"] == f"deploy/{name}-neuron.Dockerfile"
        assert name == "runtime" or not {"devices", "environment"} & neuron.keys(), "a compiler needs no device"

    def test_the_runtime_has_its_target_and_its_device(self) -> None:
        variables = {"KILN_NEURON_TARGET": "inf2", "KILN_NEURON_DEVICE": "/dev/neuron3", "KILN_CORES": "2"}
        runtime = self.services(**variables)["runtime-neuron"]
        settings = settings_of("runtime-neuron", runtime)
        assert (settings.target, settings.num_cores) == ("inf2", 2)
        assert settings.compiler.address == "compiler-neuron:50051"
        assert [device["source"] for device in runtime["devices"]] == ["/dev/neuron3"]
        assert settings_of("runtime-neuron", self.services()["runtime-neuron"]).target == "trn2"
        plain = settings_of("runtime", self.services(KILN_CORES="2")["runtime"])
        same = {name: getattr(plain, name) for name in ("target", "logical_core_size", "compiler_address")}
        assert dataclasses.replace(settings, **same) == plain
        assert runtime["depends_on"]["compiler-neuron"]["condition"] == "service_healthy"


def test_what_may_be_set(tmp_path: Path) -> None:
    model = resolve(
        COMPOSE,
        KILN_BIND="0.0.0.0",
        KILN_COMPILER_PORT="7001",
        KILN_RUNTIME_PORT="7002",
        KILN_GATEWAY_PORT="7003",
        KILN_CORES="8",
        KILN_THREADS_PER_CORE="3",
        KILN_MODELS=str(tmp_path),
        KILN_RUNTIME_MEM_LIMIT="2g",
        KILN_COMPILER_MEM_LIMIT="1g",
        KILN_PIP_EXTRA_ARGS="--pre",
        KILN_TORCH_INDEX="https://mirror.invalid/cpu",
    )
    compiler, runtime = (model["services"][name] for name in SERVICES)
    published = [port["published"] for service in (compiler, runtime) for port in service["ports"]]
    assert published == ["7001", "7002", "7003"]
    assert [service["mem_limit"] for service in (compiler, runtime)] == [str(1 << 30), str(2 << 30)]
    settings = settings_of("runtime", runtime)
    assert (settings.num_cores, settings.threads_per_core) == (8, 3)
    assert compiler["build"]["args"] == {"PIP_EXTRA_ARGS": "--pre", "TORCH_INDEX": "https://mirror.invalid/cpu"}
    assert str(tmp_path) in [mount["source"] for mount in compiler["volumes"]]


def test_compose_is_strict(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(COMPOSE.read_text().replace("healthcheck:\n", "healthchek:\n"))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        resolve(broken)
    assert "healthchek" in caught.value.stderr
