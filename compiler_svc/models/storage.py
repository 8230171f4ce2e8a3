"""How checkpoints store what a description names: under other names, and matrices by the other axis."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from compiler_svc.models.sources import Source, Stored, Transposed, map_stored

_LAYERS: Final = "model.layers"
_IN_LAYER: Final = re.compile(rf"{re.escape(_LAYERS)}\.(?P<number>\d+)\.(?P<path>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What the checkpoints of a family call their modules, and how they lay out matrices.

    Attributes:
        names: A module's path in the checkpoint, by its path in the description.
        layers: Path of the list of layers in the checkpoint; `layer_names` has paths below a layer, likewise.
        is_transposed: Whether the matrices of layers are stored as [inputs, outputs].
        optional_prefix: What names begin with unless the checkpoint is of the model without its head.
        other_names: Paths that some checkpoints have, each with what the others call it.
        other_prefixes: What names begin with in some checkpoints, each with what they begin with in the others.
        prefix: What stands before all these names, of a model that is inside of another.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    layers: str = _LAYERS
    layer_names: Mapping[str, str] = field(default_factory=dict)
    is_transposed: bool = False
    optional_prefix: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)
    other_prefixes: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def locate(self, source: Source, *, is_matrix: bool) -> Source:
        """Finds a parameter of the description in the checkpoint.

        `source` is where the description's names would put it; `is_matrix` says that it is a linear layer's matrix.
        """

        def find(stored: Stored) -> Stored | Transposed:
            found = Stored(self.find_name(stored.tensor))
            in_layer = _IN_LAYER.fullmatch(stored.tensor) is not None
            return Transposed(found) if self.is_transposed and is_matrix and in_layer else found

        return map_stored(source, find)

    def find_name(self, tensor: str) -> str:
        """What checkpoints call a tensor of the description."""
        path, _, kind = tensor.rpartition(".")
        if match := _IN_LAYER.fullmatch(path):
            inside = match["path"]
            return f"{self.prefix}{self.layers}.{match['number']}.{self.layer_names.get(inside, inside)}.{kind}"
        return f"{self.prefix}{self.names.get(path, path)}.{kind}"

    def find_other_names(self, known: Collection[str], stored: Collection[str]) -> dict[str, str]:
        """Finds the known name of each tensor that a checkpoint has under another, by the name that it has there.

        `known` are the names that most of the family's checkpoints have, `stored` those of this one.
        """
        found = {}
        for name in stored:
            path, _, kind = name.rpartition(".")
            path = next(
                (new + path.removeprefix(old) for old, new in self.other_prefixes.items() if path.startswith(old)), path
            )
            current = f"{self.other_names.get(path, path)}.{kind}"
            if current not in known and self.optional_prefix + current in known:
                current = self.optional_prefix + current
            if current != name and current not in stored:
                found[name] = current
        return found


#: Checkpoints that store everything as the description names it.
AS_DESCRIBED: Final = Storage()


def rename(source: Source, names: Mapping[str, str]) -> Source:
    """The same source with other names of tensors; those that the mapping lacks stay."""
    return map_stored(source, lambda stored: Stored(names.get(stored.tensor, stored.tensor)))
