"""What a model takes of a checkpoint's tensors, and what it leaves: found by names and headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from bundle.errors import FieldViolation
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.surplus import BIAS, ForeignPrefix, ModelNames, name_cache_scale
from compiler_svc.weights.checkpoint import Checkpoint, SurplusTensor
from compiler_svc.weights.errors import MAX_LISTED, join_names, split_number
from compiler_svc.weights.headers import CASTABLE_DTYPES, TensorHeader

_SURPLUS: Final = "model: not read, because the model does not take it: {listed}"
_BIASES: Final = (
    "model: not read, because config.json gives the modules no biases; the build refuses them if they are not zeros: "
    "{listed}"
)


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint's tensors as a model sees them.

    Attributes:
        taken: By the names that the description gives them.
        stored_names: The checkpoint's names of those that have another one there, by the description's.
        surplus: What the model leaves without a change to its numbers; of biases, if they are zeros.
        mistakes: What is missing or wrong of the others.
    """

    taken: Mapping[str, TensorHeader]
    stored_names: Mapping[str, str]
    surplus: tuple[SurplusTensor, ...]
    mistakes: tuple[FieldViolation, ...]


def take_inventory(description: ModelDescription, checkpoint: Checkpoint) -> Inventory:
    """Finds a model's tensors in a checkpoint, which may have the matrix of a tied head under the head's name alone."""
    tensors, expected = checkpoint.tensors, description.checkpoint_tensors()
    head, table = name_tied_tensors(description)
    names = ModelNames(description.storage, {*expected, *map(description.storage.find_name, _list_head(description))})
    found = {name: name for name in tensors if name in expected or (name in names.known and not tensors[name].is_empty)}
    surplus, mistakes = [], []
    hidden: dict[ForeignPrefix, list[str]] = {}
    for stored, header in tensors.items():
        if stored in found or description.find_left_out(stored) is not None:
            continue
        name, below = names.find(stored), names.find_below(stored)
        if name is None and checkpoint.packed and name_cache_scale(stored) is not None:
            # A quantizer's scales of a cache, which a compile leaves unless it keeps the cache so.
            continue
        if name is not None and name not in found and not header.is_empty:
            found[name] = stored
        elif name is not None and not header.is_empty:
            mistakes.append(FieldViolation(stored, f"one more {name}", "a tensor under one name"))
        elif below is not None and below[1] in expected.keys() - found.keys():
            hidden.setdefault(below[0], []).append(below[1])
        else:
            change = None if header.is_empty else names.find_change(stored)
            if change in (None, BIAS):
                surplus.append(SurplusTensor(header, names.generalize(stored), is_bias=change is BIAS))
            else:
                value = f"unexpected: it belongs to {change.belongs_to}, and would change what the model computes"
                mistakes.append(FieldViolation(stored, value, change.accepted))
    if description.is_tied and table not in found and head in found:
        found[table] = found[head]
    below_prefixes = {name for known in hidden.values() for name in known}
    taken = {name: tensors[stored] for name, stored in found.items()}
    return Inventory(
        taken=taken,
        stored_names={name: stored for name, stored in found.items() if name != stored},
        surplus=tuple(surplus),
        mistakes=(
            *(_refuse_prefix(prefix, len(known)) for prefix, known in hidden.items()),
            *(
                FieldViolation(name, *mistake)
                for name, shape in expected.items()
                if name not in below_prefixes and (mistake := _find_mistake(taken.get(name), shape)) is not None
            ),
            *mistakes,
        ),
    )


def name_tied_tensors(description: ModelDescription) -> tuple[str, str]:
    """Names that checkpoints usually give the matrix of the head and the embedding's table."""
    head, table = (
        description.storage.find_name(f"{one.name}.weight") for one in (description.head, description.embedding)
    )
    return head, table


def set_surplus_aside(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without the tensors that its model does not take: they are its `surplus`, which no one reads."""
    if not checkpoint.tensors:
        # Pickles that stay closed.
        return checkpoint
    surplus = take_inventory(checkpoint.description, checkpoint).surplus
    left = {one.header.name for one in surplus}
    return replace(
        checkpoint,
        tensors={name: header for name, header in checkpoint.tensors.items() if name not in left},
        packed={name: matrix for name, matrix in checkpoint.packed.items() if name not in left},
        surplus=surplus,
    )


def warn_of_surplus(checkpoint: Checkpoint) -> Iterator[str]:
    """Names the tensors that were set aside, by patterns, with their number and bytes."""
    for text, is_bias in ((_SURPLUS, False), (_BIASES, True)):
        patterns: dict[tuple[str, ...], list[SurplusTensor]] = {}
        for one in checkpoint.surplus:
            if one.is_bias is is_bias:
                patterns.setdefault(split_number(one.pattern), []).append(one)
        listed = [_describe(group) for group in list(patterns.values())[:MAX_LISTED]]
        if len(patterns) > MAX_LISTED:
            listed.append(f"and {len(patterns) - MAX_LISTED} patterns more")
        if listed:
            yield text.format(listed="; ".join(listed))


def _list_head(description: ModelDescription) -> Iterator[str]:
    return (one.name for one in description.head.parameters())


def _describe(group: list[SurplusTensor]) -> str:
    size_bytes = sum(one.header.size_bytes for one in group)
    tensors = "1 tensor" if len(group) == 1 else f"{len(group)} tensors"
    return f"{join_names(one.pattern for one in group)} ({tensors}, {size_bytes} bytes)"


def _refuse_prefix(prefix: ForeignPrefix, count: int) -> FieldViolation:
    value = f"{count} of the model's tensors, below a prefix of {prefix.made_by}, where transformers finds none"
    return FieldViolation(f"{prefix.prefix}*", value, prefix.accepted)


def _find_mistake(header: TensorHeader | None, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """What is wrong with a tensor, and what would be accepted."""
    if header is None:
        return "missing", f"a tensor of shape {list(shape)}"
    if header.shape != shape and (header.shape, shape) != ((), (1,)):
        return f"shape {list(header.shape)}", f"shape {list(shape)}, as config.json says"
    if header.dtype not in CASTABLE_DTYPES:
        return f"dtype {header.dtype}", f"one of {', '.join(CASTABLE_DTYPES)}"
    return None
