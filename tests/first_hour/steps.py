"""What six kinds of new users do in their first hour: rows of commands that the pages print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final, NamedTuple

#: Seconds that `kiln run` may take on two idle processors, installation aside, for 8 tokens: of the shipped model,
#: and of 162 M and 1.1 B parameters, in a fresh home; and of any of them the next time, while the services run.
SHIPPED_RUN_S: Final = 15.0
SMALL_RUN_S: Final = 40.0
LARGE_RUN_S: Final = 120.0
LATER_RUN_S: Final = 2.0

README: Final = "README.md"
CLIENTS: Final = "docs/clients.md"
OBSERVE: Final = "docs/operations/observe.md"
METRICS: Final = "docs/operations/metrics.md"
PROMOTE: Final = "docs/operations/promote.md"
OTHERS: Final = "examples/clients/README.md"

NEWCOMER: Final = "someone with a laptop and a checkpoint"
NXDI: Final = "a user of NxD Inference and its files"
AUTHORS: Final = "authors of clients"
OPERATOR: Final = "an operator"
APP: Final = "a developer with the openai client"
INTEGRATOR: Final = "a developer with LangChain, LiteLLM and others"


class Need(NamedTuple):
    """A shell command that succeeds on a host that has what a step needs, and what that is, after "needs"."""

    test: str
    what: str


@dataclass(frozen=True, slots=True)
class Step:
    """One command of one user.

    Attributes:
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
        user: Who gives it.
    """

    page: str
    command: str
    expects: str
    values: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    more: str = ""
    folder: str = "."
    typed: str = ""
    language: str = "sh"
    stays: bool = False
    limit_s: float | None = None
    needs: Need | None = None
    user: str = ""


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
#: What clients in other languages do with the address and the deployment that their pages name.
_ASK: Final = '127.0.0.1:50052 demo "Once upon a time"'
_RUBY_STUBS: Final = (
    "mkdir gen\ngrpc_tools_ruby_protoc -I ../../protos --ruby_out=gen --grpc_out=gen "
    "$(cd ../../protos && find google kiln -name '*.proto')"
)
_GO_PLUGINS: Final = """\
go install google.golang.org/protobuf/cmd/protoc-gen-go@latest
go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@latest"""
_GO_STUBS: Final = """\
mkdir gen && (cd gen && go mod init kiln.local/go)
protoc -I ../../protos --go_out=gen --go_opt=module=kiln.local/go \\
    --go-grpc_out=gen --go-grpc_opt=module=kiln.local/go $(cd ../../protos && find kiln -name '*.proto')"""
_NPM, _NODE = Need("command -v npm", "npm"), Need("command -v node", "Node 20.9")
_GO: Final = Need("go version | grep -qE 'go1\\.(2[4-9]|[3-9][0-9])'", "Go 1.24 or newer")
_PROMTOOL, _SKOPEO = Need("command -v promtool", "Prometheus"), Need("command -v skopeo", "skopeo")
_CHAT: Final = r"/bye[^\n]*\n\s*\w"
_GENERATE: Final = '--deployment demo --prompt "Once upon a time" --max-new-tokens 80'
_SAVED: Final = {"neuron_config.json": "tests/system/configs/neuron_config.json", "DIR": "kiln-tiny", "NAME": "saved"}
_TINY: Final = {"DIR": ".kiln/home", "story-v3": "tiny-v1"}
_COMPOSE: Final = Need(
    "docker compose version && docker buildx version && docker info",
    "a docker engine that runs, with the plugins compose and buildx",
)
_OPENAI: Final = Need(".venv/bin/python -c 'import openai'", "the openai client")

_SERVE_TOOLS: Final = """\
.venv/bin/kiln serve ./examples/models/kiln-tiny-tools --openai 127.0.0.1:8000 \\
    --override neuron_config.on_device_sampling_config=null"""
_GATEWAY: Final = """\
export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none
export ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=none
export LITELLM_LOCAL_MODEL_COST_MAP=True"""
_CLIENTS_PYTHON: Final = "examples/clients/.venv/bin/python"
_CHECK: Final = "examples/clients/.venv/bin/llm-comply -u $OPENAI_BASE_URL -k none -m kiln-tiny-tools"
_CHAT_CHECKS: Final = (
    f"{_CHECK} --format openai-chat \\\n    "
    "-f chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,"
    "chat-streaming-response,chat-streaming-usage,chat-error-handling"
)
_RESPONSE_CHECKS: Final = (
    f"{_CHECK} --format open-responses \\\n    "
    "-f basic-response,system-prompt,multi-turn,assistant-phase,error-handling"
)
_INSTALL: Final = """\
python3 -m venv examples/clients/.venv
examples/clients/.venv/bin/pip install -r examples/clients/requirements.txt"""


_SERVICES: Final = (Step(README, _UP, "ready compiler=", stays=True), Step(README, _EXPORT, ""))
#: What authors and operators serve: the second one to give it gets the bundle of the first.
_COMPILE: Final = Step(
    README, ".venv/bin/kiln compile examples/configs/tiny.yaml --model kiln-tiny --name tiny", "tiny:v1"
)


def _build(language: str, command: str, expects: str, needs: Need) -> Step:
    """What the page of a client prints, given in its folder."""
    folder = f"clients/{language}"
    values = _RUNTIME if _ASK in command else {}
    return Step(f"{folder}/README.md", command, expects, values, folder=folder, needs=needs)


def _ask(model: str, limit_s: float, *, more: str = "", needs: Need | None = None) -> Step:
    """A question to a model; a random one ends no answer by itself."""
    values = {"MODEL": model, "PROMPT": "Once upon a time"}
    options = f"--max-new-tokens 8{more}"
    return Step(README, 'kiln run MODEL "PROMPT"', "finish ", values, more=options, limit_s=limit_s, needs=needs)


def _begin_with(model: str, limit_s: float, needs: Need | None = None) -> tuple[Step, ...]:
    """The first question to a model in a fresh home, and one more."""
    home = f" --home {model}-home"
    return (
        _ask(model, limit_s, more=home, needs=needs),
        _ask(model, LATER_RUN_S, more=home, needs=needs),
        Step(README, "kiln down", "have ended", more=home.strip(), needs=needs),
    )


_USERS: Final[Mapping[str, tuple[Step, ...]]] = {
    NEWCOMER: (
        Step(README, "make demo", "finish "),
        Step(README, f".venv/bin/kiln run {SHIPPED}", _CHAT, typed="Who are you?\n/bye\n", limit_s=SHIPPED_RUN_S),
        _ask(SHIPPED, LATER_RUN_S),
        Step(README, "kiln down", "have ended"),
        *_begin_with(SMALL, SMALL_RUN_S),
        *_begin_with(LARGE, LARGE_RUN_S, _LARGE_MEMORY),
    ),
    NXDI: (
        *_SERVICES,
        Step(README, ".venv/bin/kiln plan examples/configs/tiny.yaml --model kiln-tiny", "fits", more="--target trn2"),
        Step(CLIENTS, "kiln compile neuron_config.json --model DIR --name NAME", "saved:v1", _SAVED),
        Step(CLIENTS, "kiln config export REF [-o FILE]", "exported.json", {"REF [-o FILE]": "saved -o exported.json"}),
    ),
    AUTHORS: (
        *_SERVICES,
        _COMPILE,
        Step(README, ".venv/bin/kiln load tiny --deployment demo", "ready"),
        Step(README, f".venv/bin/kiln generate {_GENERATE}", "80 generated|finish "),
        # An answer, and not the reason of an error, which the example prints too.
        Step(CLIENTS, "async def answer(question: str) -> str:", r"\A(?![A-Z_]+: )\S", language="python"),
        _build("typescript", "npm ci && npm run build && npm pack", r"kiln-client-[\d.]+\.tgz", needs=_NPM),
        _build("typescript", 'node dist/examples/generate.js "Once upon a time"', r"\w", needs=_NODE),
        _build("ruby", _RUBY_STUBS, "", needs=Need("command -v grpc_tools_ruby_protoc", "Ruby's grpc-tools")),
        _build(
            "ruby",
            f"ruby -I gen generate.rb {_ASK}",
            "tokens]",
            needs=Need("ruby -e 'require \"grpc\"'", "Ruby's grpc"),
        ),
        _build("go", _GO_PLUGINS, "", needs=_GO),
        _build("go", f"{_GO_STUBS}\ngo mod tidy\ngo run . {_ASK}", "tokens]", needs=_GO),
    ),
    OPERATOR: (
        *_SERVICES,
        _COMPILE,
        Step(OBSERVE, "python -m edge.health_check HOST:PORT", r"\ASERVING", {"HOST:PORT": "127.0.0.1:7001"}),
        Step(PROMOTE, "python -m bundle list STORE", "sha256:", {"STORE": ".kiln/home/store"}),
        Step(PROMOTE, "python -m bundle verify STORE", "are what they were", {"STORE": ".kiln/home/store"}),
        Step(METRICS, "promtool check rules deploy/monitoring/alerts.yml", "SUCCESS", needs=_PROMTOOL),
        Step(README, "docker compose up --build --wait", "Healthy", needs=_COMPOSE),
        Step(PROMOTE, "skopeo inspect --raw oci:DIR/store:story-v3", "dev.kiln", _TINY, needs=_SKOPEO),
    ),
    APP: (
        Step(README, f".venv/bin/kiln serve {SHIPPED} --openai 127.0.0.1:8000", "ready deployment=", stays=True),
        Step(README, "from openai import OpenAI", r"\w", language="python", needs=_OPENAI),
    ),
    INTEGRATOR: (
        Step(OTHERS, _SERVE_TOOLS, "ready deployment=", stays=True),
        Step(OTHERS, _INSTALL, ""),
        Step(OTHERS, "(cd examples/clients && npm ci)", "", needs=_NPM),
        Step(OTHERS, _GATEWAY, ""),
        Step(OTHERS, f"{_CLIENTS_PYTHON} examples/clients/openai_chat.py", "log probabilities: "),
        Step(OTHERS, "node examples/clients/openai_chat.mjs", "log probabilities: ", needs=_NODE),
        Step(OTHERS, f"{_CLIENTS_PYTHON} examples/clients/anthropic_tools.py", "answer: It is sunny"),
        Step(OTHERS, f"{_CLIENTS_PYTHON} examples/clients/langchain_schema.py", "call: get_weather"),
        Step(OTHERS, f"{_CLIENTS_PYTHON} examples/clients/litellm_chat.py", "as a stream: "),
        Step(OTHERS, _CHAT_CHECKS, r"\b7\b.* passed"),
        Step(OTHERS, _RESPONSE_CHECKS, r"\b5\b.* passed"),
    ),
}

STEPS: Final = tuple(replace(step, user=user) for user, steps in _USERS.items() for step in steps)
