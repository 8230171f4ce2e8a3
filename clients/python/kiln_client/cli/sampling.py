"""Options that say how long an answer may be, how its tokens are chosen and what keeps it within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import click
from google.protobuf.descriptor import FieldDescriptor
from kiln.runtime.v1.generation_pb2 import SamplingParams

from kiln_client.cli.parameters import DOCUMENT, INT32, UINT64, IntegerList, TokenBias
from kiln_client.cli.session import Decorator

#: What each parameter does; `kiln status` tells the defaults of a deployment.
HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        "temperature": "Divide the logits by this number; 0 is greedy.",
        "top_k": "Keep the K most likely tokens; 0 or -1 keeps all that the bundle considers.",
        "top_p": "Keep the smallest set of tokens whose probability reaches P.",
        "seed": "Equal seeds give equal tokens. Default: random.",
        "min_p": "Drop tokens less likely than this share of the most likely one.",
        "typical_p": "Keep the most typical tokens whose probability reaches P.",
        "repetition_penalty": "Divide positive logits of tokens of prompt and answer, and multiply negative ones.",
        "frequency_penalty": "Take this off a token's logit for each time that it was generated.",
        "presence_penalty": "Take this off a token's logit once it was generated.",
        "logit_bias": "Add BIAS to the logit of token ID; may be repeated.",
        "no_repeat_ngram_size": "Exclude tokens that would repeat so many tokens in a row of prompt and answer.",
        "bad_words": "Tokens in a row that are not generated; may be repeated.",
        "allowed_token_ids": "Exclude all other tokens.",
        "forced_token_ids": "The first tokens of the answer.",
        "min_new_tokens": "Tokens to generate at least, before those that end the answer.",
    }
)
#: Of fields that have a number; the kinds of numbers are those of the API.
_NUMBERS: Final = {
    FieldDescriptor.CPPTYPE_FLOAT: click.FLOAT,
    FieldDescriptor.CPPTYPE_INT32: INT32,
    FieldDescriptor.CPPTYPE_UINT64: UINT64,
}


def _option_of(name: str) -> Decorator:
    """Makes the option of a parameter; None leaves the choice to the runtime."""
    field, flag, help_text = SamplingParams.DESCRIPTOR.fields_by_name[name], name.replace("_", "-"), HELP[name]
    if not field.is_repeated:
        return click.option(f"--{flag}", name, type=_NUMBERS[field.cpp_type], help=help_text)
    if field.message_type is None:
        return click.option(f"--{flag}", name, type=IntegerList(), help=help_text)
    is_map = field.message_type.GetOptions().map_entry
    kind: click.ParamType[Any] = TokenBias() if is_map else IntegerList()

    def gather(_: click.Context, __: click.Parameter, values: tuple[Any, ...]) -> Any:
        return (dict(values) if is_map else [*values]) if values else None

    single = flag if is_map else flag.removesuffix("s")
    return click.option(f"--{single}", name, type=kind, multiple=True, callback=gather, help=help_text)


def _read_schema(context: click.Context, parameter: click.Parameter, file: BinaryIO | None) -> str | None:
    if file is None:
        return None
    try:
        text = file.read().decode()
        json.loads(text)
    except (RecursionError, ValueError) as error:
        raise click.BadParameter(f"{file.name} is no JSON in UTF-8: {error}", context, parameter) from None
    _take_constraint(context, parameter, text)
    return text


def _take_constraint(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Returns the value of an option, None if there is none; refuses a second constraint."""
    if value in (None, ()):
        return None
    others = (name for name in _CONSTRAINTS if name != parameter.name)
    given = [_CONSTRAINTS[name] for name in others if context.params.get(name) is not None]
    if given:
        raise click.UsageError(f"got {given[0]} and {parameter.opts[0]}; accepted: one constraint", context)
    return value


#: Options that constrain the answer, by the names of their parameters.
_CONSTRAINTS: Final = {"json_schema": "--json-schema", "regex": "--regex", "choices": "--choice"}

#: Named as the parameters of `AsyncRuntime.generate`.
SAMPLING: Final[tuple[Decorator, ...]] = (
    click.option(
        "--max-new-tokens", type=INT32, help="Tokens to generate at most. Default: all that the sequence length allows."
    ),
    *map(_option_of, HELP),
    click.option(
        "--json-schema",
        type=DOCUMENT,
        callback=_read_schema,
        help="Write JSON of this schema, a JSON file; `-` reads stdin.",
    ),
    click.option("--regex", callback=_take_constraint, help="Write text that this regular expression matches."),
    click.option(
        "--choice",
        "choices",
        multiple=True,
        callback=_take_constraint,
        help="Write this text, or one of several; may be repeated.",
    ),
)
