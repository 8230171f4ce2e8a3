"""Commands that share an option say the same of it."""

from __future__ import annotations

import click
import pytest
from kiln.runtime.v1.generation_pb2 import TokenIds
from kiln_client.cli.main import kiln
from kiln_client.cli.sampling import HELP
from kiln_client.prompts import generate_request

from compiler_svc.config.tables import NEURON_CONFIG
from compiler_svc.sharding.checkpoint_layouts import DTYPES, LAYOUTS
from execution.sampling_parameters import PARAMETERS


def option(command: str, name: str) -> click.Option:
    (found,) = [one for one in kiln.commands[command].params if isinstance(one, click.Option) and name in one.opts]
    return found


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        *(
            (name, ("run", "generate"))
            for name in ("--max-new-tokens", "--temperature", "--logit-bias", "--bad-word", "--json-schema", "--choice")
        ),
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


#: A value of each sampling parameter, as a person writes it and as the request has it.
SAMPLING: dict[str, tuple[list[str], object]] = {
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "-1"], -1),
    "top_p": (["--top-p", "0.5"], 0.5),
    "seed": (["--seed", str(2**64 - 1)], 2**64 - 1),
    "min_p": (["--min-p", "0.25"], 0.25),
    "frequency_penalty": (["--frequency-penalty", "-1"], -1.0),
    "presence_penalty": (["--presence-penalty", "1.5"], 1.5),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "logit_bias": (["--logit-bias", "4=-2.5", "--logit-bias", "5=1"], {4: -2.5, 5: 1.0}),
    "typical_p": (["--typical-p", "0.5"], 0.5),
    "no_repeat_ngram_size": (["--no-repeat-ngram-size", "3"], 3),
    "bad_words": (["--bad-word", "7,8", "--bad-word", "9"], [TokenIds(ids=[7, 8]), TokenIds(ids=[9])]),
    "min_new_tokens": (["--min-new-tokens", "3"], 3),
    "allowed_token_ids": (["--allowed-token-ids", "1,2"], [1, 2]),
    "forced_token_ids": (["--forced-token-ids", "3"], [3]),
}


def test_every_sampling_parameter_is_an_option() -> None:
    assert SAMPLING.keys() == PARAMETERS.keys() == HELP.keys()
    words = ["--deployment", "d", "--prompt", "x", *(word for said, _ in SAMPLING.values() for word in said)]
    context = kiln.commands["generate"].make_context("generate", words)
    given = {name: value for name, value in context.params.items() if value is not None and name in SAMPLING}
    asked = generate_request("d", "x", **given).sampling  # type: ignore[arg-type]
    for name, (_, value) in SAMPLING.items():
        found = getattr(asked, name)
        assert (dict(found) if isinstance(value, dict) else [*found] if isinstance(value, list) else found) == value
    unset = kiln.commands["generate"].make_context("generate", ["--deployment", "d", "--prompt", "x"]).params
    assert {unset[name] for name in SAMPLING} == {None}


def test_a_bias_is_a_token_and_a_number() -> None:
    with pytest.raises(click.BadParameter, match="accepted: ID=BIAS"):
        kiln.commands["generate"].make_context("generate", ["--deployment", "d", "--logit-bias", "4"])


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
