"""A conversation with a deployment: its history, and the loop that reads a person's lines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from kiln.runtime.v1.generation_pb2 import GenerateResponse
from kiln.runtime.v1.runtime_pb2 import Deployment

from kiln_client.cli.deployment.generate import show_event
from kiln_client.cli.local.preparation import QuickStart
from kiln_client.cli.output import Output
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.signals import blocking_signals
from kiln_client.completion import Completion, CompletionBuilder
from kiln_client.errors import KilnError, Unavailable
from kiln_client.prompts import Prompt, chat
from kiln_client.runtime import AsyncRuntime
from kiln_client.streams import AsyncStream

_PROMPT: Final = ">>> "
#: Reasons for which a quick start's deployment refuses what the one that takes over may answer.
_FOR_SUCCESSOR: Final = ("PROMPT_TOO_LONG", "DEPLOYMENT_NOT_FOUND")
_HELP: Final = "/reset forgets the conversation, /bye ends the chat, Ctrl-C ends an answer"


class Conversation:
    """The turns of a chat. A model without a chat template has none: it completes each text by itself."""

    def __init__(
        self,
        runtime: AsyncRuntime,
        deployment: Deployment,
        options: Mapping[str, Any],
        quick: QuickStart | None = None,
    ) -> None:
        """Begins a conversation. If another deployment is to take over, `quick` is what this one belongs to."""
        self.quick = quick
        self._runtime = runtime
        self._options = options
        self._turns: list[dict[str, str]] = []
        self.move(deployment)

    def ask(self, text: str) -> AsyncStream[GenerateResponse]:
        """Sends the conversation with one more turn of the person, which stays only if `keep` follows."""
        prompt: Prompt = chat([*self._turns, {"role": "user", "content": text}]) if self.has_turns else text
        return self._runtime.generate(self.deployment_id, prompt, **self._options, **self._session)

    def move(self, deployment: Deployment) -> None:
        """Goes on with another deployment, which computes the history again."""
        self.has_turns = deployment.capabilities.chat
        self.deployment_id = deployment.id
        self._has_session = self.has_turns and deployment.capabilities.sessions
        self._begin_session()

    def keep(self, text: str, answered: str) -> None:
        """Remembers a turn of the person, and its answer, as far as it came."""
        self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answered}]

    def reset(self) -> None:
        """Forgets every turn, and begins another session of the runtime."""
        self._turns = []
        self._begin_session()

    def _begin_session(self) -> None:
        self._session: Mapping[str, Any] = {"session_id": f"chat-{uuid4().hex}"} if self._has_session else {}


async def answer(output: Output, conversation: Conversation, text: str) -> Completion:
    """Shows the answer to one text as it arrives."""
    try:
        return await _answer_once(output, conversation, text)
    except KilnError as error:
        if not await _moves_on(output, conversation, error):
            raise
    return await _answer_once(output, conversation, text)


async def _answer_once(output: Output, conversation: Conversation, text: str) -> Completion:
    builder = CompletionBuilder()
    async with conversation.ask(text) as events:
        try:
            async for event in events:
                builder.add(event)
                show_event(output, event)
        finally:
            output.end_text()
    return builder.build()


async def converse(output: Output, conversation: Conversation) -> None:
    """Answers line by line until `/bye` or the end of the input, whose lines are turns without a terminal, too."""
    kind = "" if conversation.has_turns else "the model has no chat template, and completes each line; "
    output.remark(f"{kind}{_HELP}")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415 - `input` uses it for editing and for the lines before
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/bye":
                return
            case "/reset":
                conversation.reset()
                output.remark("the conversation begins again")
            case command if command.startswith("/") and " " not in command:
                output.remark(f"there is no {command}: {_HELP}")
            case text:
                if conversation.quick is not None and await conversation.quick.is_compiled():
                    await _take_over(output, conversation, conversation.quick)
                await _take_turn(output, conversation, text)


async def _moves_on(output: Output, conversation: Conversation, error: KilnError) -> bool:
    """Whether the deployment that takes over may answer what this one has refused; waits for it if so."""
    if conversation.quick is None or error.reason not in _FOR_SUCCESSOR:
        return False
    output.remark("this takes compiled code: waiting for the compile")
    return await _take_over(output, conversation, conversation.quick)


async def _take_over(output: Output, conversation: Conversation, quick: QuickStart) -> bool:
    """Moves a conversation to the deployment that takes over, between two requests; returns whether there is one."""
    conversation.quick = None
    try:
        with ProgressView(output) as view:
            conversation.move(await quick.take_over(view))
    except KilnError as error:
        output.error(error)
        output.remark("the model is not compiled: its graphs go on answering")
        return False
    output.event("taken_over", {"deployment_id": conversation.deployment_id})
    output.remark("the model is compiled: from here on its code answers")
    return True


async def _take_turn(output: Output, conversation: Conversation, text: str) -> None:
    pieces: list[str] = []
    loop = asyncio.get_running_loop()
    events = conversation.ask(text)
    loop.add_signal_handler(signal.SIGINT, events.abort)
    try:
        async for event in events:
            pieces.append(event.delta.text)
            show_event(output, event)
    except Unavailable:
        raise
    except KilnError as error:
        output.end_text()
        if not pieces and await _moves_on(output, conversation, error):
            await _take_turn(output, conversation, text)
        else:
            output.error(error)
        return
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        output.end_text()
    if answered := "".join(pieces):  # nothing came if Ctrl-C was quick
        conversation.keep(text, answered)


def _read_line() -> str | None:
    """Reads what a person types; empty if Ctrl-C gave it up, None at the end of the input."""
    try:
        with blocking_signals():
            return input(_PROMPT if sys.stdin.isatty() else "")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""
    except EOFError:
        return None
