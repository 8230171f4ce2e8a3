"""Validates and compiles what the output of a Generate call must match: a constraint, or a choice of tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bundle.errors import FieldViolation
from execution.sampling_parameters import Need
from execution.text.call_forms import ToolChoice
from execution.text.constraint import Constraint
from execution.text.prompt import ChatPrompt, Prompt
from runtime_svc.admission.capabilities import Capabilities
from runtime_svc.admission.constraints import compile_constraint, find_constraint_violations
from runtime_svc.admission.quotes import quote_value
from runtime_svc.admission.tool_choices import compile_choice, find_choice_violations, find_unserved_choice
from runtime_svc.text.codec import TextCodec


def find_output_violations(
    constraint: Constraint | None,
    choice: ToolChoice | None,
    prompt: Prompt | None,
    sampling: Mapping[str, Any],
    *,
    ignore_eos: bool,
) -> Iterator[FieldViolation]:
    """Names what is wrong with either, and what cannot be kept beside it."""
    if constraint is not None:
        yield from find_constraint_violations(constraint)
    if choice is not None:
        yield from find_choice_violations(choice, prompt)
    match constraint, choice:
        case None, None:
            return
        case Constraint(), ToolChoice():
            yield FieldViolation("tool_choice", "set", "unset, beside constraint")
    field = "tool_choice" if constraint is None else "constraint"
    if ignore_eos:
        yield FieldViolation("stop.ignore_eos", "true", f"false, beside {field}: the sequence ends where that ends")
    if forced := sampling.get("forced_token_ids"):
        yield FieldViolation("sampling.forced_token_ids", quote_value(forced), f"unset, beside {field}")


def find_unserved_output(
    constraint: Constraint | None, choice: ToolChoice | None, capabilities: Capabilities
) -> Iterator[FieldViolation]:
    """Says what a bundle that serves no constraints lacks."""
    if capabilities.constraints:
        return
    if not capabilities.text:
        lacking = "the bundle has no tokenizer"
    elif not capabilities.eos_token_ids:
        lacking = "the bundle has no end-of-sequence token"
    else:
        lacking = Need.PROCESSORS.value
    if constraint is not None:
        yield FieldViolation(f"constraint.{constraint.kind}", "set", f"unset: {lacking}")
    if choice is not None:
        yield from find_unserved_choice(choice, lacking)


async def compile_output(
    constraint: Constraint | None, choice: ToolChoice | None, prompt: Prompt, text: TextCodec
) -> tuple[Constraint | None, bytes | None]:
    """Returns what the output must match, and the mask of its first token; None where it is free."""
    if choice is not None and isinstance(prompt, ChatPrompt):
        return await compile_choice(choice, prompt, text)
    return constraint, None if constraint is None else await compile_constraint(constraint, text)
