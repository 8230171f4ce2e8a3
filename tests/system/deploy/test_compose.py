"""The compose file, built and started by a real container engine, as the pages tell users to.

`pytest -s` shows the log of the whole run.
"""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from kiln_client import KilnError, Runtime, TlsOptions, compile_request, errors

from tests.repository import ROOT
from tests.servers.authority import Authority
from tests.service.deploy.compose_file import COMPOSE, TLS, resolve
from tests.system.deploy.compose_stack import DEPLOYMENT, ComposeStack
from tests.system.deploy.engine import BASE, FOLDERS, Engine, running_engine
from tests.system.runtime_process import wait_until

#: Builds of images count as part of the first test that needs them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

#: What v0.1 was made from.
V01 = "d567ef4"
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
SERVICES = ("compiler", "runtime", "gateway")
OURS = {"kiln-stubs", "kiln-bundle", "kiln-targets", "kiln-edge", "kiln-execution"}
GIB = 1 << 30


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # In /tmp, because the paths of sockets are short. Gone afterwards: the images are gigabytes.
    with tempfile.TemporaryDirectory(prefix="kiln-engine-", dir="/tmp") as folder, running_engine(Path(folder)) as one:
        yield one


@pytest.fixture(scope="module")
def images(engine: Engine) -> dict[str, str]:
    """Service → its image, built from what Compose makes of the compose file."""
    from_wheels = f"--no-index --find-links {engine.wheels_url}"
    services = resolve(COMPOSE, COMPOSE_PROFILES="openai", KILN_PIP_EXTRA_ARGS=from_wheels)["services"]
    built = {name: service for name, service in services.items() if "build" in service}
    for service in built.values():
        described = service["build"]
        engine.build(
            Path(described["context"]),
            described["dockerfile"],
            service["image"],
            PYTHON_IMAGE=BASE,
            **described["args"],
        )
    return {name: service["image"] for name, service in built.items()}


@pytest.fixture(scope="module")
def stack(engine: Engine, images: dict[str, str]) -> Iterator[ComposeStack]:
    assert {*images} == {*SERVICES}
    started = ComposeStack(engine)
    with started.up():
        yield started


@pytest.fixture(scope="module")
def story(stack: ComposeStack) -> str:
    """What a bundle says that the stack compiled, as it does unless it is told otherwise, and loaded."""
    compile_and_load(stack, "tiny")
    return stack.answer(PROMPT)


def run_in(engine: Engine, image: str, *words: str) -> str:
    """What a program of an image prints."""
    program, *arguments = words
    return engine.run("run", "--rm", "--network=none", f"--entrypoint={program}", image, *arguments)


def compile_and_load(stack: ComposeStack, name: str) -> None:
    with stack.compiler() as compiler, stack.runtime() as runtime:
        compiled = compiler.compile(compile_request(name, "kiln-tiny", CONFIG), timeout_s=600)
        runtime.load_bundle(f"{name}:v{compiled.version}", DEPLOYMENT, timeout_s=120)


def chat(stack: ComposeStack, key: str, verify: ssl.SSLContext | bool = True) -> str:
    """What the gateway's model says, once the gateway has it."""
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    texts: list[str] = []
    http = openai.DefaultHttpx2Client(verify=verify)
    with openai.OpenAI(base_url=stack.gateway_url, api_key=key, max_retries=0, http_client=http) as client:

        def has_answered() -> bool:
            try:
                found = client.chat.completions.create(model=DEPLOYMENT, messages=messages, max_tokens=8, temperature=0)
            except (openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                return False
            texts.append(str(found.choices[0].message.content))
            return True

        wait_until(has_answered)
    return texts[0]


@pytest.mark.parametrize(("name", "service"), [("compiler", "kiln-compiler"), ("runtime", "kiln-runtime")])
def test_an_image_holds_what_its_service_needs_and_no_more(
    engine: Engine, images: dict[str, str], name: str, service: str
) -> None:
    program = "import importlib.metadata as found; print(*{one.name for one in found.distributions()})"
    names = {*run_in(engine, images[name], "/opt/kiln/bin/python", "-c", program).split()}
    assert {found for found in names if found.startswith("kiln")} == {*OURS, service}
    assert not [found for found in names if found.startswith("nvidia") or found in {"triton", "pip"}]
    assert ("transformers" in names) == (name == "compiler")
    assert ("smg-grpc-proto" in names) == (name == "runtime"), "routers find an engine in the runtime"
    assert bool(run_in(engine, images[name], "sh", "-c", "command -v g++ || true")) == (name == "compiler")
    assert run_in(engine, images[name], "id", "-u") == "10001"


def test_images_are_built_from_sources_alone(engine: Engine) -> None:
    engine.run("build", "--file=-", "--tag=context", str(ROOT), input_text=f"FROM {BASE}\nCOPY . /context")
    found = {Path(path) for path in run_in(engine, "context", "find", "/context", "-type", "f").splitlines()}
    assert Path("/context/runtime_svc/pyproject.toml") in found
    assert {path.parts[2] for path in found} == {"deploy", "neuron_lowering", *FOLDERS}
    assert not {path.suffix for path in found} & {".so", ".pyc"}
    assert not [
        path for path in found if "build" in path.parts or any(part.endswith("egg-info") for part in path.parts)
    ]


def test_first_use(stack: ComposeStack, story: str) -> None:
    assert story
    assert story == stack.answer(PROMPT)
    with pytest.raises(errors.Unauthenticated), stack.runtime(token="") as anonymous:
        anonymous.get_server_info()


def test_the_gateway_asks_for_its_key(stack: ComposeStack, story: str) -> None:
    key = stack.api_key()
    assert chat(stack, key)
    with pytest.raises(openai.AuthenticationError):
        chat(stack, "none")
    # Who may add runtimes would read what others ask.
    workers_url = f"http://{stack.addresses['GATEWAY']}/workers"
    added = httpx2.post(workers_url, headers={"Authorization": f"Bearer {key}"}, json={"url": "grpc://127.0.0.1:9"})
    assert added.status_code == 401


@pytest.mark.parametrize("service", SERVICES)
def test_a_root_file_system_is_read_only(stack: ComposeStack, service: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        stack.compose("exec", "-T", service, "sh", "-c", "echo changed > /var/lib/kiln/file")
    assert "Read-only file system" in caught.value.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_starts_again_with_its_volumes(stack: ComposeStack, story: str, service: str) -> None:
    key = stack.api_key()
    stack.compose("restart", service)
    stack.compose("up", "--no-build", "--wait")
    assert stack.answer(PROMPT) == story
    assert chat(stack, key)
    with stack.bundles() as bundles:
        assert [bundle.version for bundle in bundles.list_bundles("tiny")] == [1]


def test_a_runtime_that_crashes_comes_back_with_its_gateway(stack: ComposeStack, story: str) -> None:
    key = stack.api_key()
    stack.crash("runtime")
    assert stack.answer(PROMPT) == story
    assert chat(stack, key)


def test_deployments_get_their_share_of_a_memory_limit(engine: Engine, stack: ComposeStack, story: str) -> None:
    stack.set(KILN_RUNTIME_MEM_LIMIT="1g", KILN_COMPILER_MEM_LIMIT="2g")
    stack.compose("up", "--no-build", "--wait")
    for service, size in (("runtime", GIB), ("compiler", 2 * GIB)):
        container = stack.compose("ps", "--quiet", service)
        assert int(engine.run("inspect", "--format", "{{.HostConfig.Memory}}", container)) == size
    with stack.runtime() as runtime:
        assert runtime.get_server_info().total_memory_bytes == int(GIB * 0.8)
    assert stack.answer(PROMPT) == story


def test_down_keeps_the_volumes_and_tls_changes_nothing(
    engine: Engine, stack: ComposeStack, story: str, tmp_path: Path
) -> None:
    stack.compose("down")
    assert engine.run("ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=kiln") == ""
    tmp_path.chmod(0o755)
    authority = Authority(tmp_path)
    pairs = [authority.issue(name) for name in ("compiler", "runtime", "client")]
    for path in (path for pair in pairs for path in pair):
        path.chmod(0o644)
    tls = TlsOptions(authority.path, *pairs[-1])
    secured = ComposeStack(engine, (COMPOSE, TLS), tls=tls, KILN_CERTIFICATES=str(tmp_path))
    with secured.up():
        assert secured.answer(PROMPT) == story
        with secured.runtime() as runtime:
            runtime.load_weights(DEPLOYMENT, "tiny:v1")  # which asks the compiler, over TLS
        with pytest.raises(errors.Unauthenticated), secured.runtime(token="") as anonymous:
            anonymous.get_server_info()
        with (
            pytest.raises(KilnError),
            Runtime(secured.addresses["RUNTIME"], tls=TlsOptions(authority.path)) as stranger,
        ):
            stranger.get_server_info()
        assert chat(secured, secured.api_key(), ssl.create_default_context(cafile=str(authority.path)))
    secured.compose("down", "--volumes")
    assert engine.run("volume", "ls", "--quiet", "--filter", "label=com.docker.compose.project=kiln") == ""


def test_an_upgrade_from_v01(engine: Engine, images: dict[str, str], tmp_path: Path) -> None:
    tree = tmp_path / "v0.1"
    tree.mkdir()
    archive = tmp_path / "v0.1.tar"
    subprocess.run(["git", "-C", ROOT, "archive", f"--output={archive}", V01], check=True)
    shutil.unpack_archive(archive, tree)
    # Its Dockerfiles hand no options to every pip.
    settings = f"FROM {BASE}\nENV PIP_NO_INDEX=1 PIP_FIND_LINKS={engine.wheels_url}\n"
    engine.run("build", "--tag", "kiln-test-python:v0.1", "-", input_text=settings)
    override = tmp_path / "v0.1.yml"
    override.write_text(
        json.dumps({"services": {name: {"image": f"kiln-{name}:v0.1"} for name in ("compiler", "runtime")}})
    )
    for name in ("compiler", "runtime"):
        engine.build(
            tree,
            f"deploy/{name}.Dockerfile",
            f"kiln-{name}:v0.1",
            PYTHON_IMAGE="kiln-test-python:v0.1",
            TORCH="torch==2.13.0+cpu",
        )
    old = ComposeStack(engine, (tree / "docker-compose.yml", override), project="upgraded")
    with old.up():
        compile_and_load(old, "tiny")
        story = old.answer(PROMPT)
    new = ComposeStack(engine, project="upgraded")
    with new.up():
        assert new.answer(PROMPT) == story
        with new.compiler() as compiler:
            compiled = compiler.compile(compile_request("tiny", "kiln-tiny", CONFIG), timeout_s=600)
        assert compiled.version == 2
    new.compose("down", "--volumes")
