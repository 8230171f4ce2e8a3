"""The names that families give to attributes which all decoders have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from compiler_svc.models.attributes import AttributeReader


@dataclass(frozen=True, slots=True)
class AttributeNames:
    """What a family's `config.json` calls attributes; those that are not listed have their common name.

    `names` lists, by the common name, the names that it may have: the family's own, by which errors call the attribute,
    then others that transformers takes for it. Without any, the family has no such attribute.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def list_names(self, name: str) -> tuple[str, ...]:
        """Names that `config.json` may have for an attribute."""
        return self.names.get(name, (name,))

    def list_synonyms(self, name: str) -> tuple[str, ...]:
        """Names of the attribute that a `config.json` calls `name`, itself included."""
        return next((names for names in self.names.values() if name in names), (name,))

    def has(self, name: str) -> bool:
        """Whether the family has an attribute."""
        return bool(self.list_names(name))

    def find(self, model: AttributeReader, name: str) -> str:
        """Finds the name under which a `config.json` has an attribute; the family's own if it has none.

        Two names with different values are a mistake, which is noted in `model`.
        """
        first, *others = self.list_names(name)
        found = [one for one in (first, *others) if model.values.get(one) is not None]
        for other in found[1:]:
            if model.values[other] != model.values[found[0]]:
                accepted = f"{model.values[found[0]]!r}, which {found[0]} says: both name one attribute"
                model.note_invalid(other, model.values[other], accepted)
        return found[0] if found else first


#: Of families that have the common names.
COMMON_NAMES: Final = AttributeNames()
