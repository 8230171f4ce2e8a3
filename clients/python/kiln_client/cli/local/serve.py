"""The command `kiln serve`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from kiln.runtime.v1.runtime_pb2 import Deployment
from rich.text import Text

from kiln_client.cli.local.lookup import Checkpoint, deployment_name
from kiln_client.cli.local.options import ADDRESSES, MEMORY, ModelChoice, model_options
from kiln_client.cli.local.preparation import Preparation, find_here
from kiln_client.cli.output import Output
from kiln_client.cli.parameters import NamedPath
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_message
from kiln_client.cli.session import Session, add_options, local_command
from kiln_client.errors import FailedPrecondition, InvalidArgument
from kiln_client.prompts import chat
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.gateway import GATEWAY, GatewayConfig, find_free_port, require_gateway, running_gateway
from kiln_client.stack.home import read_record
from kiln_client.stack.stack import StackAddresses, StackConfig, run_stack

_BATCH_SIZE = 4
_LOOPBACK = "127.0.0.1"
_CALL = chat([
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "callabcde", "function": {"name": "call", "arguments": '{"key": "value"}'}}],
    },
])  # fmt: skip
#: What a template writes of the call above, and SMG's parser that reads such calls. The first that is found counts.
TOOL_CALL_PARSERS = (
    ("<tool_call>\n{", "qwen"),
    ("<tool_call>\n<function=call>", "qwen_xml"),
    ("<tool_call>call\n<arg_key>", "glm45_moe"),
    ("<tool_call>call<arg_key>", "glm47_moe"),
    ("[TOOL_CALLS] [{", "mistral"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>call\n```json\n", "deepseek"),
    ("<｜tool▁call▁begin｜>call<｜tool▁sep｜>{", "deepseek31"),
    ("<|tool_call_argument_begin|>{", "kimik2"),
    ('<minimax:tool_call>\n<invoke name="call">', "minimax_m2"),
    ("<|START_ACTION|>", "cohere"),
    ('{"name": "call", "parameters": {', "llama"),
    ("[call(key=", "pythonic"),
    # Reads JSON wherever it stands; what is around it stays in the content.
    ('{"name": "call", "arguments": {', "json"),
)


@click.command("serve")
@click.argument("model")
@add_options(ADDRESSES)
@click.option(
    "--openai",
    "openai_address",
    metavar="HOST:PORT",
    envvar="KILN_OPENAI",
    show_envvar=True,
    help="Address at which a gateway, SMG, serves the APIs of OpenAI and Anthropic; port 0 takes a free port. "
    "Default: no gateway.",
)
@click.option(
    "--allow-insecure",
    is_flag=True,
    envvar="KILN_ALLOW_INSECURE",
    show_envvar=True,
    help="Serve beyond loopback, in plaintext and without authentication.",
)
@click.option(
    "--adapter",
    "adapters",
    type=NamedPath(),
    multiple=True,
    help="LoRA adapter, as PEFT or NxD's training saves it, and what requests call it; may be repeated. It is made a"
    " part of the model's bundle. Clients of the gateway ask for it as for a model.",
)
@MEMORY
@model_options
@local_command
async def serve_command(
    session: Session,
    *,
    model: str,
    openai_address: str | None,
    adapters: tuple[tuple[str, Path], ...],
    choice: ModelChoice,
    **given: Any,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Starts both services, compiles MODEL if the cache lacks it, loads it, and prints `ready deployment=ID
    runtime=HOST:PORT compiler=HOST:PORT`. Four requests run at once. With --openai it also starts a gateway, and adds
    `openai=URL` when the gateway serves the model: the base URL for clients of OpenAI, which ask for the model ID,
    or for an adapter by its name.

    MODEL is a bundle (NAME, NAME:vN, NAME@ALIAS or sha256:HEX), the name of a directory below a model root, a path of
    a directory or a GGUF file, or ORG/NAME of the Hugging Face Hub. A path without a `/` begins with `./`.
    """
    for name, path in adapters:
        choice = choice.with_adapter(name, path)
    stack = StackConfig.for_one_person(choice.home, model_roots=choice.model_roots, **given)
    gateway = None if openai_address is None else _gateway_config(openai_address, stack)
    found = find_here(session.output, model, stack.all_model_roots, choice.home, yes=choice.yes)
    if isinstance(found, Checkpoint):
        stack = stack.with_model_roots(found.roots)

    deployment_id, addresses_of_adapters = None, {}
    if gateway is not None:  # which asks the runtime for a model without naming a deployment, or an adapter
        deployment_id = found.name if isinstance(found, Checkpoint) else deployment_name(model)
        addresses_of_adapters = _choose_addresses(adapters, deployment_id)
        stack = replace(
            stack,
            engine_deployment=deployment_id,
            engine_adapters=tuple(f"{name}={address}" for name, address in addresses_of_adapters.items()),
        )

    async def serve(addresses: StackAddresses) -> None:
        services = read_record(choice.home)
        assert services is not None, "this process has announced them"
        with ProgressView(session.output) as view:
            preparation = Preparation(services, choice.given, _BATCH_SIZE, view, True, deployment_id)
            deployment = await preparation.prepare(found or model)
        if gateway is None:
            _report_ready(session.output, deployment, addresses)
            return
        async with preparation.runtime() as runtime:
            parser = await find_tool_call_parser(runtime, deployment.id)
        models = {deployment.id: services.runtime, **addresses_of_adapters}
        async with running_gateway(gateway, models, parser) as running:
            _report_ready(session.output, deployment, addresses, openai=f"{running.url}/v1")
            await running.failure()

    await run_stack(stack, lambda _: None, serve)
    session.output.result({"event": "stopped"}, Text("stopped"))


async def find_tool_call_parser(runtime: AsyncRuntime, deployment_id: str) -> str | None:
    """Finds SMG's parser for a model's calls of tools by how its template writes one; None: SMG chooses by the name."""
    try:
        token_ids = await runtime.tokenize(deployment_id, _CALL)
        text = await runtime.detokenize(deployment_id, token_ids, skip_special_tokens=False)
    except (InvalidArgument, FailedPrecondition):  # no tokenizer, no template, or one that writes no calls
        return None
    return choose_tool_call_parser(text)


def choose_tool_call_parser(text: str) -> str | None:
    """Chooses SMG's parser by how a text writes a call of `call`; None if no parser reads such calls."""
    return next((parser for written, parser in TOOL_CALL_PARSERS if written in text), None)


def _gateway_config(address: str, stack: StackConfig) -> GatewayConfig:
    """Reads where the gateway is to listen, before anything starts."""
    require_gateway()
    return GatewayConfig.parse(
        address,
        allow_insecure=stack.allow_insecure,
        log_path=stack.logs_path / f"{GATEWAY.name}.log",
        ready_timeout_s=stack.ready_timeout_s,
        stop_timeout_s=stack.stop_timeout_s,
    )


def _choose_addresses(adapters: Iterable[tuple[str, Path]], deployment_id: str) -> dict[str, str]:
    """Chooses the addresses at which the runtime speaks for adapters, by their names."""
    if deployment_id in dict(adapters):
        raise click.UsageError(f"--adapter {deployment_id}: the model itself has that name")
    return {name: f"{_LOOPBACK}:{find_free_port(_LOOPBACK)}" for name, _ in adapters}


def _report_ready(output: Output, deployment: Deployment, addresses: StackAddresses, **more: str) -> None:
    record = {"compiler": addresses.compiler, "runtime": addresses.runtime, **more}
    output.event("ready", {"deployment": record_from_message(deployment), **record})
    words = {"deployment": deployment.id, "runtime": addresses.runtime, "compiler": addresses.compiler, **more}
    output.text(f"ready {' '.join(f'{name}={value}' for name, value in words.items())}\n")
