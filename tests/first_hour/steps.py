"""What five kinds of new users do in their first hour: rows of commands that the pages print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Seconds that `kiln run` may take on two idle processors, installation aside, for 8 tokens: of the shipped model,
#: and of 162 M and 1.1 B parameters, in a fresh home; and of any of them the next time, while the services run.
SHIPPED_RUN_S: Final = 15.0
SMALL_RUN_S: Final = 40.0
LARGE_RUN_S: Final = 120.0
LATER_RUN_S: Final = 2.0

README: Final = "README.md"
CLIENTS: Final = "docs/clients.md"
OPERATIONS: Final = "docs/operations.md"

NEWCOMER: Final = "someone with a laptop and a checkpoint"
NXDI: Final = "a user of NxD Inference and its files"
AUTHORS: Final = "authors of clients"
OPERATOR: Final = "an operator"
APP: Final = "a developer with the openai client"


@dataclass(frozen=True, slots=True)
class Need:
    """What a host must have for a step.

    Attributes:
        test: Shell command that succeeds on a host that has it.
        what: What it is, after "needs".
    """

    test: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command of one user.

    Attributes:
        user: Who gives it.
        page: Page that prints the command.
        command: The command as the page prints it; in Python, a line of the block to run.
        expects: Regular expression that its output matches.
        values: What the user writes for the names in capitals, and for other values of the page.
        more: Options behind the command, which the page describes.
        folder: Folder of the clone that it is given in.
        typed: What the user types.
        language: `sh` or `python`.
        stays: Whether the command goes on beside the next steps of its user, once the output matches.
        limit_s: Seconds that it may take at most; None for any.
        needs: What the host must have; without it, the step is not run.
    """

    user: str
    page: str
    command: str
    expects: str
    values: Mapping[str, str] = field(default_factory=dict)
    more: str = ""
    folder: str = "."
    typed: str = ""
    language: str = "sh"
    stays: bool = False
    limit_s: float | None = None
    needs: Need | None = None


SHIPPED: Final = "./examples/models/kiln-tiny"
#: Directories of the clone that hold random checkpoints, which the script writes.
SMALL: Final = "./random-162m"
LARGE: Final = "./random-1b"
_LARGE_MEMORY: Final = Need("awk '/MemAvailable/ {exit $2 < 12000000}' /proc/meminfo", "12 GB of free memory")

_UP: Final = """\
.venv/bin/kiln up --home .kiln/home --compiler-address 127.0.0.1:7001 --runtime-address 127.0.0.1:7002 \\
    --cores 2 --model-root examples/models"""
_EXPORT: Final = "export KILN_COMPILER=127.0.0.1:7001 KILN_RUNTIME=127.0.0.1:7002"
_RUNTIME: Final = {"127.0.0.1:50052": "127.0.0.1:7002"}


def _services(user: str) -> tuple[Step, ...]:
    return (
        Step(user=user, page=README, command=_UP, expects="ready compiler=", stays=True),
        Step(user=user, page=README, command=_EXPORT, expects=""),
    )


def _ask(model: str, limit_s: float, *, more: str = "", needs: Need | None = None) -> Step:
    """A question to a model; a random one ends no answer by itself."""
    return Step(
        user=NEWCOMER,
        page=README,
        command='kiln run MODEL "PROMPT"',
        values={"MODEL": model, "PROMPT": "Once upon a time"},
        more=f"--max-new-tokens 8{more}",
        expects="finish ",
        limit_s=limit_s,
        needs=needs,
    )


def _begin_with(model: str, limit_s: float, needs: Need | None = None) -> tuple[Step, ...]:
    """The first question to a model in a fresh home, and one more."""
    home = f" --home {model}-home"
    return (
        _ask(model, limit_s, more=home, needs=needs),
        _ask(model, LATER_RUN_S, more=home, needs=needs),
        Step(user=NEWCOMER, page=README, command="kiln down", more=home.strip(), expects="have ended", needs=needs),
    )


STEPS: Final = (
    Step(user=NEWCOMER, page=README, command="make demo", expects="finish "),
    Step(
        user=NEWCOMER,
        page=README,
        command=".venv/bin/kiln run ./examples/models/kiln-tiny",
        typed="Who are you?\n/bye\n",
        expects=r"/bye[^\n]*\n\s*\w",
        limit_s=SHIPPED_RUN_S,
    ),
    _ask(SHIPPED, LATER_RUN_S),
    Step(user=NEWCOMER, page=README, command="kiln down", expects="have ended"),
    *_begin_with(SMALL, SMALL_RUN_S),
    *_begin_with(LARGE, LARGE_RUN_S, _LARGE_MEMORY),
    *_services(NXDI),
    Step(
        user=NXDI,
        page=README,
        command=".venv/bin/kiln plan examples/configs/tiny.yaml --model kiln-tiny",
        more="--target trn2",
        expects="fits",
    ),
    Step(
        user=NXDI,
        page=CLIENTS,
        command="kiln compile neuron_config.json --model DIR --name NAME",
        values={"neuron_config.json": "tests/system/configs/neuron_config.json", "DIR": "kiln-tiny", "NAME": "saved"},
        expects="saved:v1",
    ),
    Step(
        user=NXDI,
        page=CLIENTS,
        command="kiln config export REF [-o FILE]",
        values={"REF [-o FILE]": "saved -o exported.json"},
        expects="exported.json",
    ),
    *_services(AUTHORS),
    Step(
        user=AUTHORS,
        page=README,
        command=".venv/bin/kiln compile examples/configs/tiny.yaml --model kiln-tiny --name tiny",
        expects="tiny:v1",
    ),
    Step(user=AUTHORS, page=README, command=".venv/bin/kiln load tiny --deployment demo", expects="ready"),
    Step(
        user=AUTHORS,
        page=README,
        command='.venv/bin/kiln generate --deployment demo --prompt "Once upon a time" --max-new-tokens 80',
        expects="80 generated|finish ",
    ),
    Step(
        user=AUTHORS,
        page=CLIENTS,
        command="async def answer(question: str) -> str:",
        language="python",
        expects=r"\A(?![A-Z_]+: )\S",  # an answer, and not the reason of an error, which the example prints too
    ),
    Step(
        user=AUTHORS,
        page="clients/typescript/README.md",
        command="npm ci && npm run build && npm pack",
        folder="clients/typescript",
        expects=r"kiln-client-[\d.]+\.tgz",
        needs=Need("command -v npm", "npm"),
    ),
    Step(
        user=AUTHORS,
        page="clients/typescript/README.md",
        command='node dist/examples/generate.js "Once upon a time"',
        folder="clients/typescript",
        expects=r"\w",
        needs=Need("command -v node", "Node 20.9"),
    ),
    Step(
        user=AUTHORS,
        page="clients/ruby/README.md",
        command="mkdir gen\ngrpc_tools_ruby_protoc -I ../../protos --ruby_out=gen --grpc_out=gen "
        "$(cd ../../protos && find google kiln -name '*.proto')",
        folder="clients/ruby",
        expects="",
        needs=Need("command -v grpc_tools_ruby_protoc", "Ruby's grpc-tools"),
    ),
    Step(
        user=AUTHORS,
        page="clients/ruby/README.md",
        command='ruby -I gen generate.rb 127.0.0.1:50052 demo "Once upon a time"',
        values=_RUNTIME,
        folder="clients/ruby",
        expects="tokens]",
        needs=Need("ruby -e 'require \"grpc\"'", "Ruby's grpc"),
    ),
    Step(
        user=AUTHORS,
        page="clients/go/README.md",
        command="go install google.golang.org/protobuf/cmd/protoc-gen-go@latest\n"
        "go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@latest",
        folder="clients/go",
        expects="",
        needs=Need("go version | grep -qE 'go1\\.(2[4-9]|[3-9][0-9])'", "Go 1.24 or newer"),
    ),
    Step(
        user=AUTHORS,
        page="clients/go/README.md",
        command="""\
mkdir gen && (cd gen && go mod init kiln.local/go)
protoc -I ../../protos --go_out=gen --go_opt=module=kiln.local/go \\
    --go-grpc_out=gen --go-grpc_opt=module=kiln.local/go $(cd ../../protos && find kiln -name '*.proto')
go mod tidy
go run . 127.0.0.1:50052 demo "Once upon a time\"""",
        values=_RUNTIME,
        folder="clients/go",
        expects="tokens]",
        needs=Need("go version | grep -qE 'go1\\.(2[4-9]|[3-9][0-9])'", "Go 1.24 or newer"),
    ),
    *_services(OPERATOR),
    Step(
        user=OPERATOR,
        page=OPERATIONS,
        command="python -m edge.health_check HOST:PORT",
        values={"HOST:PORT": "127.0.0.1:7001"},
        expects="",
    ),
    Step(
        user=OPERATOR,
        page=OPERATIONS,
        command="python -m bundle list STORE",
        values={"STORE": ".kiln/home/store"},
        expects="sha256:",
    ),
    Step(
        user=OPERATOR,
        page=OPERATIONS,
        command="python -m bundle verify STORE",
        values={"STORE": ".kiln/home/store"},
        expects="",
    ),
    Step(
        user=OPERATOR,
        page=OPERATIONS,
        command="promtool check rules deploy/monitoring/alerts.yml",
        expects="SUCCESS",
        needs=Need("command -v promtool", "Prometheus"),
    ),
    Step(
        user=OPERATOR,
        page=README,
        command="docker compose up --build --wait",
        expects="Healthy",
        needs=Need("docker info", "a container engine"),
    ),
    Step(
        user=OPERATOR,
        page=OPERATIONS,
        command="skopeo inspect --raw oci:DIR/store:story-v3",
        values={"DIR": ".kiln/home", "story-v3": "tiny-v1"},
        expects="dev.kiln",
        needs=Need("command -v skopeo", "skopeo"),
    ),
    Step(
        user=APP,
        page=README,
        command=".venv/bin/kiln serve ./examples/models/kiln-tiny --openai 127.0.0.1:8000",
        expects="ready deployment=",
        stays=True,
    ),
    Step(
        user=APP,
        page=README,
        command="from openai import OpenAI",
        language="python",
        expects=r"\w",
        needs=Need(".venv/bin/python -c 'import openai'", "the openai client"),
    ),
)
