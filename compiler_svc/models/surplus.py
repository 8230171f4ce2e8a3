"""Tensors that a checkpoint has and its model does not take, by their names: what transformers warns of and drops.

Most say nothing of the model: value heads, what trainers add, cached tables, layers beyond the last. Some would change
what it computes, so that a checkpoint with them is not the model that `config.json` describes.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from compiler_svc.models.storage import Storage


@dataclass(frozen=True, slots=True)
class Change:
    """What tensors belong to that would change numbers, if `pattern` is behind a module of the model in their names.

    `needs_weight`: that module has a weight; others have masks and the like under these names.
    """

    pattern: re.Pattern[str]
    belongs_to: str
    accepted: str
    needs_weight: bool = False


#: Biases change nothing if they are zeros, which their values alone can say.
BIAS: Final = Change(
    re.compile(r"\.bias"),
    "a bias that config.json does not give to the module",
    "zeros, or attributes that say that the module has a bias",
    needs_weight=True,
)
CHANGES: Final = (
    BIAS,
    Change(
        re.compile(
            r"\.(qweight|qzeros|g_idx|weight_(packed|shape|zero_point|g_idx|format)|_weight_\w+|(input|output)_zero_point"
            r"|scales?|(weight|input|output|activation|q|k|v|kv|prob)_scale(_inv)?"
            r"|SCB|weight\.((nested_)?(absmax|quant_map)|quant_state\..+))"
        ),
        "a matrix or a cache that is quantized",
        "a quantization_config that says how, or the checkpoint before it was quantized",
    ),
    Change(
        re.compile(r"\.(\w*norm\w*|ln_\w+)(\.norms\.\d+)?\.(weight|bias)"),
        "a norm, such as one of queries and keys, that the model does not have",
        "the architecture and the attributes that the checkpoint is of",
    ),
    Change(
        re.compile(r"\.(attn_|attention_)?sinks?"),
        "attention sinks, which the model does not have",
        "the architecture that the checkpoint is of",
    ),
    Change(
        re.compile(r"(\.\w+)?\.lora_\w+(\.\w+)*"),
        "an adapter, which is not part of the weights",
        "a checkpoint that it is merged into, or an adapter in a directory of its own",
    ),
)


#: Names of the scales of a layer's keys and values: NxD Inference's, which compressed-tensors has, too; vLLM's own; and
#: behind the projections, as ModelOpt and the first releases of compressed-tensors have them.
_CACHE_SCALE: Final = re.compile(
    r"(?P<attention>.+?)\.((attn\.)?(?P<usual>[kv]_scale)|(?P<own>[kv])_proj\.((?P=own)_scale|output_scale))"
)


def name_cache_scale(stored: str) -> str | None:
    """The usual name of a layer's scale of keys or values that a checkpoint calls `stored`; None if it is none."""
    found = _CACHE_SCALE.fullmatch(stored)
    return found and f"{found['attention']}.{found['usual'] or found['own'] + '_scale'}"


@dataclass(frozen=True, slots=True)
class ForeignPrefix:
    """What others put before all names, so that transformers finds nothing."""

    prefix: str
    made_by: str
    accepted: str


FOREIGN_PREFIXES: Final = (
    ForeignPrefix(
        "base_model.model.", "an adapter's model of PEFT", "what its `merge_and_unload()` saves, or names without it"
    ),
    ForeignPrefix("module.", "DataParallel", "what `model.module` saves, or names without it"),
    ForeignPrefix("_orig_mod.", "torch.compile", "what the model saves before it is compiled, or names without it"),
    *(
        ForeignPrefix(
            prefix, "a model that takes more than text", "the text model saved alone, or the whole one's config.json"
        )
        for prefix in ("model.language_model.", "language_model.")
    ),
)


@dataclass(frozen=True)
class ModelNames:
    """The names of a model's tensors in its checkpoints. `known` are those that it takes, or may find."""

    storage: Storage
    known: Collection[str]

    @cached_property
    def _modules(self) -> frozenset[str]:
        """Modules that have some of the tensors, at any depth."""
        return frozenset(name[:end] for name in self.known for end in _list_ends(name))

    def find(self, stored: str) -> str | None:
        """The known name of a tensor that a checkpoint calls `stored`; None if the model does not take it."""
        usual = name_cache_scale(stored) or stored
        return next((name for name in self.storage.list_names(usual) if name in self.known), None)

    def find_below(self, stored: str) -> tuple[ForeignPrefix, str] | None:
        """The prefix that hides a tensor from transformers, and the known name of the tensor behind it."""
        for one in FOREIGN_PREFIXES:
            name = self.find(stored.removeprefix(one.prefix)) if stored.startswith(one.prefix) else None
            if name is not None:
                return one, name
        return None

    def find_change(self, stored: str) -> Change | None:
        """What a tensor that the model does not take would change in its numbers; None if nothing that is known."""
        module, rest = self._split(stored)
        for one in CHANGES if module else ():
            if one.pattern.fullmatch(rest) and (f"{module}.weight" in self.known or not one.needs_weight):
                return one
        return None

    def generalize(self, stored: str) -> str:
        """A pattern of a tensor that the model does not take: of all that is in the outermost module that it lacks."""
        inside = self._split(stored)[1].removeprefix(".").partition(".")[2]
        return f"{stored.removesuffix(inside)}*" if inside else stored

    def _split(self, stored: str) -> tuple[str, str]:
        """The innermost module of the model that a tensor is in, and the rest of its name."""
        names = [*self.storage.list_names(stored)]
        for one in FOREIGN_PREFIXES:
            if stored.startswith(one.prefix):
                names += self.storage.list_names(stored.removeprefix(one.prefix))
        return min(map(self._split_known, names), key=lambda parts: len(parts[1]))

    def _split_known(self, name: str) -> tuple[str, str]:
        end = next((end for end in reversed(_list_ends(name)) if name[:end] in self._modules), 0)
        return name[:end], name[end:]


def _list_ends(name: str) -> list[int]:
    """Where the names of the modules end that a tensor is in."""
    return [place for place, character in enumerate(name) if character == "."]
