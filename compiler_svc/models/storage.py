"""How checkpoints store what a description names: under other names, and matrices by the other axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
        optional_prefix: What names of the model without its head begin with in checkpoints of the whole model. Others
            may leave it out, or have it once more before all names: transformers' `base_model_prefix`.
        other_names: Paths that some checkpoints have, each with what the others call it.
        other_prefixes: What names begin with in some checkpoints, each with what they begin with in the others.
        prefix: What stands before all these names, of a model that is inside of another.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    layers: str = _LAYERS
    layer_names: Mapping[str, str] = field(default_factory=dict)
    is_transposed: bool = False
    optional_prefix: str = "model."
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

    def list_names(self, stored: str) -> Iterator[str]:
        """What most of the family's checkpoints may call a tensor that one of them calls `stored`, likeliest first."""
        path, dot, kind = stored.rpartition(".")
        path = next(
            (new + path.removeprefix(old) for old, new in self.other_prefixes.items() if path.startswith(old)), path
        )
        yield f"{self.other_names.get(path, path)}{dot}{kind}"
        if prefix := self.optional_prefix:
            inner = path.removeprefix(prefix)
            # transformers knows other names of a module only where it has them in memory.
            if inner != path and inner not in self.other_names.values():
                yield f"{self.other_names.get(inner, inner)}{dot}{kind}"
            yield f"{prefix}{path}{dot}{kind}"


#: Checkpoints that store everything as the description names it.
AS_DESCRIBED: Final = Storage()


def rename(source: Source, names: Mapping[str, str]) -> Source:
    """The same source with other names of tensors; those that the mapping lacks stay."""
    return map_stored(source, lambda stored: Stored(names.get(stored.tensor, stored.tensor)))
