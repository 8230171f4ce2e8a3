"""Commands that share an option say the same of it."""

from __future__ import annotations

import click
import pytest
from kiln_client.cli.main import kiln


def option(command: str, name: str) -> click.Option:
    (found,) = [one for one in kiln.commands[command].params if isinstance(one, click.Option) and name in one.opts]
    return found


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        *(
            (name, ("run", "generate"))
            for name in ("--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed")
        ),
        *((name, ("up", "serve")) for name in ("--compiler-address", "--runtime-address", "--memory")),
        ("--model-root", ("up", "serve", "run")),
        *((name, ("serve", "run")) for name in ("--config", "--override", "--optimization-level", "--yes")),
    ],
)
def test_an_option_is_one_option(name: str, commands: tuple[str, ...]) -> None:
    first, *others = (option(command, name) for command in commands)
    for other in others:
        assert (other.help, other.default, other.metavar, other.multiple, other.opts, other.type.name) == (
            first.help,
            first.default,
            first.metavar,
            first.multiple,
            first.opts,
            first.type.name,
        )


@pytest.mark.parametrize("command", ["run", "generate"])
def test_top_k_of_minus_one_is_explained(command: str) -> None:
    assert "0 or -1" in (option(command, "--top-k").help or "")
