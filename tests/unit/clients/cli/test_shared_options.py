"""Commands that share an option say the same of it."""

from __future__ import annotations

import click
import pytest
from kiln_client.cli.main import kiln

from compiler_svc.config.tables import NEURON_CONFIG
from compiler_svc.sharding.checkpoint_layouts import DTYPES, LAYOUTS


def option(command: str, name: str) -> click.Option:
    (found,) = [one for one in kiln.commands[command].params if isinstance(one, click.Option) and name in one.opts]
    return found


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("--max-new-tokens", ("run", "generate")),
        *((name, ("run", "generate")) for name in ("--temperature", "--top-k", "--top-p", "--seed")),
        *((name, ("up", "serve")) for name in ("--compiler-address", "--runtime-address", "--memory")),
        ("--model-root", ("up", "serve", "run")),
        ("--quantize", ("serve", "run", "compile", "plan")),
        *((name, ("serve", "run")) for name in ("--config", "--override", "--optimization-level", "--yes")),
    ],
)
def test_an_option_is_one_option(name: str, commands: tuple[str, ...]) -> None:
    options = [option(command, name) for command in commands]
    said = [(one.help, one.default, one.metavar, one.multiple, one.opts, one.type.name) for one in options]
    assert all(one == said[0] for one in said[1:])


def test_quantize_takes_what_the_configuration_takes() -> None:
    kinds = option("run", "--quantize").type
    assert isinstance(kinds, click.Choice)
    words = NEURON_CONFIG.find("quantization_dtype").domain.words
    assert set(kinds.choices) == {word.partition("_by_")[0] for word in words}


def test_quantize_knows_what_the_compiler_writes() -> None:
    kinds = [option("quantize", name).type for name in ("--dtype", "--layout")]
    assert [set(kind.choices) for kind in kinds if isinstance(kind, click.Choice)] == [set(DTYPES), set(LAYOUTS)]


@pytest.mark.parametrize("command", ["run", "generate"])
def test_top_k_of_minus_one_is_explained(command: str) -> None:
    assert "0 or -1" in (option(command, "--top-k").help or "")
