"""Both services from virtual environments that hold what their Dockerfiles copy and install, started as Compose would.

There is no container engine in this test: the steps of the Dockerfiles are carried out in a scratch directory.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kiln.runtime.v1.runtime_pb2 import Deployment
from kiln_client import Bundles, Compiler, KilnError, Runtime, Timeouts, TlsOptions, compile_request, errors

from tests.repository import ROOT
from tests.servers.authority import Authority
from tests.service.deploy.build_context import BuildContext
from tests.service.deploy.compose_file import COMPOSE, TLS, resolve
from tests.system.deploy.container import Container
from tests.system.deploy.image_builder import ImageBuilder, Stage

#: Building both images counts as part of the first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = {
    "neuron_config": {
        "seq_len": 64,
        "batch_size": 2,
        "torch_dtype": "float32",
        "is_continuous_batching": True,
        "ctx_batch_size": 1,
    }
}
PROMPT = "Once upon a time"
OURS = {"kiln-stubs", "kiln-bundle", "kiln-targets", "kiln-edge", "kiln-execution"}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A directory that is gone afterwards: the images are gigabytes."""
    with tempfile.TemporaryDirectory(prefix="kiln-images-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def images(scratch: Path) -> dict[str, Stage]:
    model = resolve(COMPOSE)
    files = {
        name: ROOT / service["build"]["dockerfile"] for name, service in model["services"].items() if "build" in service
    }
    built = ImageBuilder(BuildContext(ROOT), scratch / "images").build(files.values())
    return {name: built[path.name] for name, path in files.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def make_containers(images: dict[str, Stage], scratch: Path, model: dict[str, Any]) -> dict[str, Container]:
    ports = {port: free_port() for image in images.values() for port in image.ports}
    used = {**images, "issuer": images["compiler"]}
    assert model["services"]["issuer"]["image"] == model["services"]["compiler"]["image"]
    return {
        name: Container(
            name, model["services"][name], image, volumes=scratch / "volumes", ports=ports, log=scratch / f"{name}.log"
        )
        for name, image in used.items()
    }


def issue_token(containers: dict[str, Container]) -> str:
    """A token for everything, as the compose file says to make one."""
    scopes = ("infer", "load", "compile", "promote", "admin")
    return containers["issuer"].run("--subject=test", *(f"--scope={scope}" for scope in scopes))


@pytest.fixture(scope="module")
def containers(images: dict[str, Stage], scratch: Path) -> dict[str, Container]:
    return make_containers(images, scratch, resolve(COMPOSE))


@contextmanager
def running(containers: dict[str, Container]) -> Iterator[None]:
    """Starts the services in Compose's order, and stops them."""
    started: list[Container] = []
    containers["issuer"].run()
    try:
        for name in ("compiler", "runtime"):
            assert not containers[name].is_healthy()
            containers[name].start()
            started.append(containers[name])
            containers[name].wait_healthy()
        yield
        assert all(container.is_healthy() for container in started)
    finally:
        codes = {container.name: container.stop() for container in reversed(started)}
    assert codes == {"compiler": 0, "runtime": 0}


@pytest.fixture(scope="module")
def generated(containers: dict[str, Container], scratch: Path) -> str:
    """What a bundle generated that one stack compiled and loaded; the stack is stopped, its volumes remain."""
    with (
        running(containers),
        Compiler(containers["compiler"].address, token=issue_token(containers)) as compiler,
        Runtime(containers["runtime"].address, token=issue_token(containers)) as runtime,
        Runtime(containers["runtime"].address, token="") as anonymous,
    ):
        with pytest.raises(errors.Unauthenticated):
            anonymous.get_server_info()
        compiled = compiler.compile(compile_request("tiny", "kiln-tiny", CONFIG, optimization_level=0), timeout_s=240)
        before = _listing(scratch / "volumes" / "store")
        deployment = runtime.load_bundle(f"tiny:v{compiled.version}", "demo", timeout_s=120)
        assert deployment.roles[0].bundle_digest == compiled.digest
        completion = runtime.complete("demo", PROMPT, max_new_tokens=8, temperature=0.0)
        assert _listing(scratch / "volumes" / "store") == before  # which the runtime's mount would not let it change
    assert completion.usage.generated_tokens == 8
    return completion.text


@pytest.mark.parametrize(("name", "service"), [("compiler", "kiln-compiler"), ("runtime", "kiln-runtime")])
def test_image_holds_its_own_distributions_only(containers: dict[str, Container], name: str, service: str) -> None:
    program = (
        "import importlib.metadata as metadata, sys\n"
        "print(*sorted({found.name for found in metadata.distributions()}))\n"
        "print(*sys.path)"
    )
    names, search_path = containers[name].run_python(program).stdout.splitlines()
    assert {found for found in names.split() if found.startswith("kiln")} == {*OURS, service}
    assert not [found for found in names.split() if found.startswith("nvidia") or found == "triton"]
    assert str(ROOT) not in search_path
    assert ("transformers" in names.split()) == (name == "compiler")
    assert ("smg-grpc-proto" in names.split()) == (name == "runtime"), "routers find an engine in the runtime"


@pytest.mark.parametrize("module", ["compiler_svc", "transformers", "sqlalchemy", "kiln_client"])
def test_the_runtime_cannot_import_what_compiles(containers: dict[str, Container], module: str) -> None:
    result = containers["runtime"].run_python(f"import {module}")
    assert f"ModuleNotFoundError: No module named '{module}'" in result.stderr


def test_the_compiler_cannot_import_the_runtime(containers: dict[str, Container]) -> None:
    assert "ModuleNotFoundError" in containers["compiler"].run_python("import runtime_svc").stderr


def test_the_images_need_the_packages_that_they_say(images: dict[str, Stage]) -> None:
    assert [command for command in images["runtime"].recorded if "apt-get" in command] == []
    assert "g++" in " ".join(images["compiler"].recorded)
    assert {image.user for image in images.values()} == {"10001:10001"}


def test_compile_load_and_generate(generated: str) -> None:
    assert generated.strip()


def test_volumes_outlive_the_containers_and_tls_changes_nothing(
    images: dict[str, Stage], scratch: Path, generated: str
) -> None:
    folder = scratch / "certificates"
    folder.mkdir()
    authority = Authority(folder)
    authority.issue("compiler")
    authority.issue("runtime")
    ours = TlsOptions(authority.path, *authority.issue("client"))
    containers = make_containers(images, scratch, resolve(COMPOSE, TLS, KILN_CERTIFICATES=str(folder)))
    compiler_address, runtime_address = containers["compiler"].address, containers["runtime"].address
    with (
        running(containers),
        Bundles(compiler_address, tls=ours, token=issue_token(containers)) as bundles,
        Runtime(runtime_address, tls=ours, token=issue_token(containers)) as runtime,
        Runtime(runtime_address, tls=ours, token="") as anonymous,
        Runtime(runtime_address, tls=TlsOptions(authority.path), timeouts=Timeouts(read_s=5)) as stranger,
    ):
        with pytest.raises(errors.Unauthenticated):
            anonymous.get_server_info()
        with pytest.raises(KilnError):
            stranger.get_server_info()
        assert [bundle.version for bundle in bundles.list_bundles("tiny")] == [1]
        deadline = time.monotonic() + 60
        while runtime.get_deployment("demo").state != Deployment.STATE_READY and time.monotonic() < deadline:
            time.sleep(0.1)
        assert runtime.complete("demo", PROMPT, max_new_tokens=8, temperature=0.0).text == generated
        runtime.load_weights("demo", "tiny:v1")  # which asks the compiler, over TLS


def _listing(folder: Path) -> dict[str, tuple[int, float]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime) for path in sorted(folder.rglob("*"))
    }
