"""The commands `kiln generate`, `kiln embed` and `kiln tokenize`."""

from __future__ import annotations

from typing import Any, BinaryIO

import click
from kiln.runtime.v1.generation_pb2 import GenerateResponse, ToolChoice, Usage
from rich.text import Text

from kiln_client.cli.output import Output
from kiln_client.cli.parameters import DOCUMENT, INT32, SECONDS, IntegerList, StepRange, read_document
from kiln_client.cli.records import record_from_completion, record_from_completions, record_from_message
from kiln_client.cli.sampling import SAMPLING
from kiln_client.cli.session import Session, add_options, remote_command
from kiln_client.completion import Completion, CompletionBuilder
from kiln_client.enums import enum_names
from kiln_client.prompts import Prompt, chat_from_document

_DEPLOYMENT = click.option("--deployment", "deployment_id", required=True, metavar="ID", help="Deployment to use.")
_PROMPT = click.option("--prompt", metavar="TEXT", help="Prompt as text.")
_CHAT = click.option(
    "--chat",
    type=DOCUMENT,
    help="Prompt as a conversation: YAML or JSON, a list of {role, content} or {messages, tools}; `-` reads stdin.",
)


def _read_tool_choice(_context: click.Context, _parameter: click.Parameter, choice: str | None) -> Any:
    is_mode = choice is None or choice in enum_names(ToolChoice.Mode.DESCRIPTOR)
    return choice if is_mode else {"function": {"name": choice}}


@click.command("generate")
@_DEPLOYMENT
@_PROMPT
@click.option("--token-ids", type=IntegerList(), help="Prompt as token ids.")
@_CHAT
@add_options(SAMPLING)
@click.option(
    "--stop", "stop_strings", multiple=True, metavar="TEXT", help="Text that ends generation; may be repeated."
)
@click.option(
    "--stop-token-id", "stop_token_ids", type=INT32, multiple=True, help="Token that ends generation; may be repeated."
)
@click.option("--ignore-eos", is_flag=True, default=None, help="Continue after end-of-sequence tokens.")
@click.option("--logprobs", type=INT32, help="Report log probabilities of each token and of this many alternatives.")
@click.option(
    "--prompt-logprobs",
    type=INT32,
    help="Report the prompt's tokens first, with log probabilities of each and of this many alternatives.",
)
@click.option("--echo", is_flag=True, default=None, help="Report the prompt's text and tokens first.")
@click.option("--logits", is_flag=True, default=None, help="Report all logits of each token; only --json prints them.")
@click.option(
    "--capture-inputs",
    type=StepRange(),
    help="Make the runtime write the inputs of COUNT steps, from the request's step FIRST on, to a file on its host.",
)
@click.option(
    "--cache-salt",
    metavar="TEXT",
    help="Share cached prefixes only with requests of the same salt. Default: with all that have none.",
)
@click.option(
    "--num-sequences",
    type=INT32,
    help="Sequences to generate for the prompt. Each is printed when it has ended; its seed is the given one plus its "
    "number.",
)
@click.option("--adapter", metavar="NAME", help="Adapter to use, one of `kiln adapters list`. Default: none.")
@click.option(
    "--tool-choice",
    metavar="CHOICE",
    callback=_read_tool_choice,
    help="Keep calls of tools to their parameters: auto, none, required, or the name of the only function to "
    "call. Default: what the model writes.",
)
@click.option("--request-id", help="Id for logs and aborts. Default: the runtime chooses.")
@click.option("--session", "session_id", help="Session that the request continues; its prompt is whole all the same.")
@click.option("--timeout", "timeout_s", type=SECONDS, help="Deadline, in seconds.")
@remote_command
async def generate_command(
    session: Session,
    *,
    deployment_id: str,
    prompt: str | None,
    token_ids: tuple[int, ...] | None,
    chat: BinaryIO | None,
    **options: Any,
) -> None:
    """Generate text and print it as it arrives.

    Give the prompt as exactly one of --prompt, --token-ids and --chat. Interrupting the command ends the request.
    """
    given_prompt = _read_prompt(prompt, chat, token_ids)
    given = {name: value for name, value in options.items() if value is not None}
    builder, output, has_several = CompletionBuilder(), session.output, given.get("num_sequences", 1) > 1
    async with session.runtime() as runtime, runtime.generate(deployment_id, given_prompt, **given) as events:
        try:
            async for event in events:
                builder.add(event)
                show_event(output, event, shows_text=not has_several)
                if has_several and event.HasField("finished"):
                    _show_sequence(output, event.sequence_index, builder.build_sequence(event.sequence_index))
        finally:
            output.end_text()
    completions = builder.build_sequences()
    completion = completions[0]
    if completion.accepted.truncated_tokens:
        output.remark(f"the first {completion.accepted.truncated_tokens} tokens of the prompt were cut")
    if has_several:
        output.result({"event": "result", **record_from_completions(completions)})
        return
    output.remark(usage_line(completion.usage, finish=_finish(completion), weight_epoch=completion.weight_epoch))
    if completion.captured_inputs_path:
        output.remark(f"inputs are in {completion.captured_inputs_path} on the runtime's host")
    if completion.capture_error is not None:
        output.remark(f"inputs were not captured: {completion.capture_error.message}")
    output.result({"event": "result", **record_from_completion(completion)})


@click.command("embed")
@_DEPLOYMENT
@click.option("--prompt", "texts", metavar="TEXT", multiple=True, help="Prompt as text; may be repeated.")
@click.option(
    "--token-ids", "ids", type=IntegerList(), multiple=True, help="Prompt as token ids; may be repeated, behind texts."
)
@click.option("--pooling", type=click.Choice(["last", "mean"]), help="Take the last token's vector, or the mean.")
@click.option("--normalize", is_flag=True, help="Divide each vector by its length.")
@click.option("--adapter", default="", metavar="NAME", help="Adapter to use. Default: none.")
@click.option("--timeout", "timeout_s", type=SECONDS, help="Deadline, in seconds.")
@remote_command
async def embed_command(
    session: Session, *, deployment_id: str, texts: tuple[str, ...], ids: tuple[tuple[int, ...], ...], **options: Any
) -> None:
    """Turn prompts into vectors.

    People see how long each vector is and its first numbers; --json prints all.
    """
    if not texts and not ids:
        raise click.UsageError("got no prompts; accepted: --prompt and --token-ids, once or several times")
    async with session.runtime() as runtime:
        embeddings = await runtime.embed(deployment_id, [*texts, *ids], **options)
    beginnings = [" ".join(f"{value:.4g}" for value in one.values[:4]) for one in embeddings]
    shown = [
        f"{len(one.values)} numbers of {one.prompt_tokens} tokens: {beginning}"
        for one, beginning in zip(embeddings, beginnings, strict=True)
    ]
    records = [record_from_message(one) for one in embeddings]
    session.output.result({"embeddings": records}, Text("\n".join(shown)))


@click.command("tokenize")
@_DEPLOYMENT
@_PROMPT
@_CHAT
@remote_command
async def tokenize_command(session: Session, *, deployment_id: str, prompt: str | None, chat: BinaryIO | None) -> None:
    """Show the token ids of a prompt.

    `kiln generate` would use the same ids.
    """
    given_prompt = _read_prompt(prompt, chat)
    async with session.runtime() as runtime:
        token_ids = await runtime.tokenize(deployment_id, given_prompt)
    session.output.result({"token_ids": token_ids, "count": len(token_ids)}, Text(",".join(map(str, token_ids))))


def _read_prompt(prompt: str | None, chat: BinaryIO | None, token_ids: tuple[int, ...] | None = None) -> Any:
    prompts: list[Prompt] = []
    if prompt is not None:
        prompts.append(prompt)
    if token_ids is not None:
        prompts.append(token_ids)
    if chat is not None:
        prompts.append(chat_from_document(read_document(chat, reason="REQUEST_INVALID", field="chat")))
    if len(prompts) != 1:
        options = [f"--{parameter}" for parameter in ("prompt", "token-ids", "chat")]
        raise click.UsageError(f"got {len(prompts)} prompts; accepted: exactly one of {', '.join(options)}")
    return prompts[0]


def show_event(output: Output, event: GenerateResponse, *, shows_text: bool = True) -> None:
    """Shows one event of a generation: to a program all of it, to a person its text if `shows_text`."""
    kind = event.WhichOneof("event") or "unknown"
    record = record_from_message(event)
    payload = {name: record.pop(name) for name in ("accepted", "prompt", "delta", "finished")}.get(kind)
    output.event(kind, record | (payload or {}))
    if kind in ("prompt", "delta") and shows_text:
        output.text(event.prompt.text if kind == "prompt" else event.delta.text)


def _show_sequence(output: Output, index: int, completion: Completion) -> None:
    """Shows one of several sequences to a person, whole, because the pieces of all would be mixed."""
    output.text(f"sequence {index}:\n{completion.text}")
    output.end_text()
    output.remark(usage_line(completion.usage, finish=_finish(completion), weight_epoch=completion.weight_epoch))


def usage_line(usage: Usage, *, finish: str, weight_epoch: int) -> str:
    """Describes in one line the tokens and times of a generation."""
    queue, prefill, decode = (
        duration.ToTimedelta().total_seconds()
        for duration in (usage.queue_duration, usage.prefill_duration, usage.decode_duration)
    )
    # The prefill gives the first token.
    rate = f" ({(usage.generated_tokens - 1) / decode:.1f} tokens/s)" if decode and usage.generated_tokens > 1 else ""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_prompt_tokens} cached),"
        f" {usage.generated_tokens} generated, finish {finish}, queue {queue * 1e3:.0f} ms,"
        f" prefill {prefill * 1e3:.0f} ms, decode {decode * 1e3:.0f} ms{rate}, weight epoch {weight_epoch}"
    )


def _finish(completion: Completion) -> str:
    return completion.finish_reason if completion.stop is None else f"{completion.finish_reason} {completion.stop!r}"
