"""The option `--model`, and the checkpoint that it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from kiln_client.errors import NotFound

T = TypeVar("T")

MODEL = click.option(
    "--model",
    required=True,
    metavar="NAME|DIR",
    help="Hugging Face checkpoint: a name below a model root of the compiler, else a directory of this host that the "
    "compiler may read. What begins with . or / is a directory of this host.",
)


async def call_with_checkpoint(model: str, call: Callable[[str], Awaitable[T]]) -> T:
    """Calls the compiler with the checkpoint that `--model` names, and returns what `call` returns.

    A name below a model root means the same checkpoint in every current directory. A directory of this host is tried
    only if the compiler knows no such name.

    Args:
        model: The value of `--model`.
        call: Sends the request with the model that it gets. It may be called twice.
    """
    if model.startswith((".", "/")):
        return await call(_absolute(model))
    try:
        return await call(model)
    except NotFound as error:
        is_refused = error.reason == "CHECKPOINT_NOT_FOUND" and "operation" not in error.metadata
        if not is_refused or not Path(_absolute(model)).exists():  # noqa: ASYNC240 - one look, as short as a call
            raise
    return await call(_absolute(model))


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
