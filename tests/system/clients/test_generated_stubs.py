"""Clients in languages that Kiln has no SDK for, from the protos alone: Go and Ruby stream, Java compiles."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from kiln.runtime.v1 import generation_pb2 as pb

from tests.repository import ROOT
from tests.servers.stack import Stack
from tests.tools import require_tool

PROTOS = ROOT / "protos"
KILN = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("kiln/**/*.proto"))
GOOGLE = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("google/**/*.proto"))

GO_LIBRARIES = ("google.golang.org/grpc", "github.com/golang/protobuf/proto/registry.go")
JARS = ("protobuf", "grpc-api", "grpc-stub", "grpc-protobuf", "guava", "geronimo-annotation-1.3-spec")

#: Debian's Go knows this proto by the path that it had before its own module.
GO_PATHS = "Mgoogle/longrunning/operations.proto=google.golang.org/genproto/googleapis/longrunning"

PROMPT = "Once upon a time"
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def continuation(stack: Stack, tiny: str) -> str:
    """What the examples print: greedy text of the model, and how it ended."""
    request = pb.GenerateRequest(
        deployment_id=tiny,
        text=PROMPT,
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_new_tokens=NUM_TOKENS),
    )
    events = list(stack.generation().Generate(request))
    text = "".join(event.delta.text for event in events)
    assert len(events) > 4, "the stream is too short to show that an example reads all of it"
    finished = events[-1].finished
    return f"{text}\n[{pb.FinishReason.Name(finished.reason)}, {finished.usage.generated_tokens} tokens]\n"


def run(*command: str | Path, **variables: str) -> str:
    """Runs a command in the folder of the protos, and returns its output; shows what it printed if it fails."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=PROTOS,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, f"{command[:3]}\n{result.stdout}{result.stderr}"
    return result.stdout


def fail(*command: str | Path) -> str:
    """What a command that fails says."""
    result = subprocess.run(command, cwd=PROTOS, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def go_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of clients/go, built in a GOPATH with stubs of every proto."""
    protoc, go = require_tool("protoc"), require_tool("go")
    require_tool("protoc-gen-go")
    require_tool("protoc-gen-go-grpc")
    grpc, _ = (require_tool(f"share/gocode/src/{name}") for name in GO_LIBRARIES)
    home = tmp_path_factory.mktemp("go")
    sources = home / "src"
    example = sources / "kiln.local/go/example"
    example.mkdir(parents=True)
    (example / "generate.go").write_bytes((ROOT / "clients/go/generate.go").read_bytes())
    out = [f"--{name}_{word}" for name in ("go", "go-grpc") for word in (f"out={sources}", f"opt={GO_PATHS}")]
    run(protoc, "-I.", *out, *KILN)
    settings = {"GO111MODULE": "off", "GOPATH": f"{home}{os.pathsep}{grpc.parents[2]}", "GOFLAGS": ""}
    run(go, "vet", "kiln.local/go/example", **settings)
    run(go, "build", "kiln.local/go/kiln/...", **settings)
    run(go, "build", "-o", home / "generate", "kiln.local/go/example", **settings)
    return home / "generate"


@pytest.mark.slow
def test_go_streams(go_example: Path, stack: Stack, tiny: str, continuation: str) -> None:
    assert run(go_example, stack.runtime, tiny, PROMPT) == continuation


@pytest.mark.slow
def test_go_names_what_is_wrong(go_example: Path, stack: Stack) -> None:
    assert "DEPLOYMENT_NOT_FOUND" in fail(go_example, stack.runtime, "nobody", PROMPT)


def test_go_module_replaces_the_path_of_the_protos() -> None:
    module = json.loads(run(require_tool("go"), "mod", "edit", "-json", ROOT / "clients/go/go.mod"))
    (replacement,) = module["Replace"]
    assert replacement["New"]["Path"] == "./gen"
    assert all(f'go_package = "{replacement["Old"]["Path"]}/' in (PROTOS / name).read_text() for name in KILN)


@pytest.mark.slow
def test_ruby_streams(tmp_path: Path, stack: Stack, tiny: str, continuation: str) -> None:
    ruby = require_tool("ruby")
    run(
        require_tool("grpc_tools_ruby_protoc"),
        "-I.",
        f"--ruby_out={tmp_path}",
        f"--grpc_out={tmp_path}",
        *GOOGLE,
        *KILN,
    )
    example = ROOT / "clients/ruby/generate.rb"
    assert run(ruby, "-I", tmp_path, example, stack.runtime, tiny, PROMPT) == continuation
    assert "DEPLOYMENT_NOT_FOUND" in fail(ruby, "-I", tmp_path, example, stack.runtime, "nobody", PROMPT)
    services = [name.removesuffix(".proto") + "_services_pb" for name in KILN if "config" not in name]
    run(ruby, "-I", tmp_path, *(word for name in services for word in ("-r", name)), "-e", "Kiln::Compiler::V1")


@pytest.mark.slow
def test_java_compiles(tmp_path: Path) -> None:
    """Every message and service, in the packages that the protos name."""
    protoc, javac, plugin = require_tool("protoc"), require_tool("javac"), require_tool("grpc_java_plugin")
    path = os.pathsep.join(str(require_tool(f"share/java/{name}.jar")) for name in JARS)
    sources, classes = tmp_path / "sources", tmp_path / "classes"
    sources.mkdir()
    out = [f"--java_out={sources}", f"--grpc-java_out={sources}", f"--plugin=protoc-gen-grpc-java={plugin}"]
    run(protoc, "-I.", *out, *GOOGLE, *KILN)
    # The first compiler of the virtual machine is enough for one short run: half the time.
    quick = ["-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", "-proc:none", "-g:none", "-nowarn"]
    run(javac, *quick, "-d", classes, "-cp", path, *sources.rglob("*.java"))
    assert (classes / "dev/kiln/runtime/v1/GenerationServiceGrpc.class").exists()
    assert (classes / "dev/kiln/compiler/v1/CompileRequest.class").exists()
