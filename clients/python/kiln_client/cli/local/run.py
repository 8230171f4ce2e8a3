"""The command `kiln run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from kiln.runtime.v1.runtime_pb2 import Deployment

from kiln_client.cli.deployment.generate import usage_line
from kiln_client.cli.local.background import reach_services
from kiln_client.cli.local.chat import Conversation, answer, converse
from kiln_client.cli.local.lookup import name_of
from kiln_client.cli.local.options import ModelChoice, model_options
from kiln_client.cli.local.preparation import Preparation, QuickStart, find_here
from kiln_client.cli.parameters import NamedPath
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.records import record_from_completion
from kiln_client.cli.sampling import SAMPLING
from kiln_client.cli.session import Session, add_options, local_command
from kiln_client.errors import NotFound
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.home import StackRecord, read_record

_BATCH_SIZE = 1


@click.command("run")
@click.argument("model")
@click.argument("prompt", required=False)
@add_options(SAMPLING)
@click.option(
    "--quick-start/--no-quick-start",
    default=True,
    help="Let a small model's graphs answer while its code is compiled, or wait for the code. Default: do, unless an"
    " option says how the model is compiled.",
)
@click.option(
    "--adapter",
    type=NamedPath(),
    help="LoRA adapter that changes the answers, as PEFT or NxD's training saves it, and what requests call it. It is"
    " made a part of the model's bundle.",
)
@model_options
@local_command
async def run_command(
    session: Session,
    *,
    model: str,
    prompt: str | None,
    quick_start: bool,
    adapter: tuple[str, Path] | None,
    choice: ModelChoice,
    **options: Any,
) -> None:
    """Answer PROMPT with a model, or chat with it.

    MODEL is a bundle (NAME, NAME:vN, NAME@ALIAS or sha256:HEX), the name of a directory below a model root, a path of
    a directory or a GGUF file, or ORG/NAME of the Hugging Face Hub. A path without a `/` begins with `./`.

    The command uses the services of the home, or starts them in the background, where they stay until `kiln down`. It
    compiles the model if the cache lacks it; until then, the graphs of a small model answer. In a chat, Ctrl-C ends an
    answer, `/reset` forgets the conversation, and `/bye` or Ctrl-D ends the chat.
    """
    if prompt is None and session.output.as_json:
        raise click.UsageError("--json needs a PROMPT: a chat is no JSON")
    if adapter is not None:
        choice, options["adapter"] = choice.with_adapter(*adapter), adapter[0]
    home, given = choice.home, choice.given
    running = read_record(home)
    known_roots = (home / "models", *map(Path, running.model_roots if running else ()), *choice.model_roots)
    found = find_here(session.output, model, known_roots, home, yes=choice.yes)
    services, deployment, quick = running, None, None
    if running is not None and not given.says_something:
        deployment = await _find_served(running, found.name if found else name_of(model))
    if services is None or deployment is None:
        needed_roots = [*(root.resolve() for root in choice.model_roots), *(found.roots if found else ())]
        services = await reach_services(home, needed_roots, session.output.remark)
        with ProgressView(session.output) as view:
            preparation = Preparation(services, given, _BATCH_SIZE, view, may_replace=services.is_detached)
            prepare = preparation.prepare_quickly if quick_start else preparation.prepare
            ready = await prepare(found or model)
        quick = ready if isinstance(ready, QuickStart) else None
        deployment = ready.deployment if isinstance(ready, QuickStart) else ready
    if quick is not None:
        longest = deployment.capabilities.max_length
        session.output.event("quick_start", {"deployment_id": deployment.id, "max_length": longest})
        session.output.remark(
            f"until its code is compiled, the model's graphs answer, up to {longest} tokens; --no-quick-start waits"
        )
    given_options = {name: value for name, value in options.items() if value is not None}
    async with AsyncRuntime(services.runtime, **services.connection) as runtime:
        conversation = Conversation(runtime, deployment, given_options, quick)
        if prompt is None:
            if quick is not None:
                await quick.compile()
            await converse(session.output, conversation)
            return
        completion = await answer(session.output, conversation, prompt)
    usage = usage_line(completion.usage, finish=completion.finish_reason, weight_epoch=completion.weight_epoch)
    session.output.remark(usage)
    if conversation.quick is not None:
        await conversation.quick.compile()
    record = {"event": "result", "deployment_id": conversation.deployment_id, **record_from_completion(completion)}
    session.output.result(record)


async def _find_served(services: StackRecord, name: str) -> Deployment | None:
    """Finds the deployment of that name that a person serves; None in the background, where the checkpoint decides."""
    if services.is_detached:
        return None
    async with AsyncRuntime(services.runtime, **services.connection) as runtime:
        try:
            deployment = await runtime.get_deployment(name)
        except NotFound:
            return None
    return deployment if deployment.state == Deployment.STATE_READY else None
