"""What the configuration of an adapter says: PEFT's `adapter_config.json`, or the one in NxD's file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import re2

from bundle.errors import FieldViolation
from compiler_svc.adapters.errors import AdapterInvalid

CONFIG_FILE: Final = "adapter_config.json"
#: Weight files beside it, in the order of preference.
WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
MAX_RANK: Final = 1 << 16
#: PEFT's name of the rank, and NxD's.
_RANK_NAMES: Final = ("r", "lora_rank")
_RANKS: Final = f"an integer from 1 to {MAX_RANK}"
_MAX_ALPHA: Final = 1 << 20
_NUMBERS: Final = f"a number of at most {_MAX_ALPHA}"
#: PEFT's, of a configuration that does not say it.
_DEFAULT_ALPHA: Final = 8
_RSLORA: Final = "use_rslora"
_PATTERNS: Final = "regular expressions of module names, without backreferences and lookaround"

#: Attributes that change what an adapter computes, or what belongs to it: the value beside those that set nothing with
#: which it is served, and why others are not.
_SERVED: Final[Mapping[str, tuple[str | None, str]]] = {
    "peft_type": ("LORA", "other methods than LoRA are not served"),
    "use_dora": (None, "DoRA scales the model's own matrices; merge the adapter into a checkpoint"),
    "bias": ("none", "the model's biases are the same for all adapters"),
    "lora_bias": (None, "an adapter adds B(A x), without a bias"),
    "modules_to_save": (None, "the model's own modules are the same for all adapters"),
    "trainable_token_indices": (None, "embeddings are the same for all adapters"),
    "target_parameters": (None, "adapters of experts are not served"),
    "layer_replication": (None, "the layers of the model stay as they are"),
    "alora_invocation_tokens": (None, "an adapter acts on every token of a request"),
    "arrow_config": (None, "a request chooses its adapter"),
}
#: Variants of LoRA, each of which has an attribute of its own in PEFT.
_VARIANT: Final = re.compile(r"use_\w+")
#: Ways to start the training that take a part out of the model's own matrices.
_RESIDUAL: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_CONVERTED: Final = (
    "true, as `save_pretrained` writes it with `path_initial_model_for_weight_conversion`: this adapter is of a model "
    "that it has taken a part of"
)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Ranks and scales of an adapter.

    Attributes:
        has_root_scale: Whether the scale is alpha / sqrt(rank), as in rsLoRA, in place of alpha / rank.
        ranks: Ranks of modules whose names a pattern matches, the first that does, in place of `rank`. RE2 takes a time
            that is linear in the name, whatever the pattern, which is a client's.
        alphas: The same of alpha.
    """

    rank: int
    alpha: float
    has_root_scale: bool
    ranks: tuple[tuple[re2.Pattern, int], ...] = ()
    alphas: tuple[tuple[re2.Pattern, float], ...] = ()

    @property
    def largest_rank(self) -> int:
        """The largest rank that it names."""
        return max(self.rank, *(rank for _, rank in self.ranks), 0)

    def find_rank(self, module: str) -> int:
        """The rank of the matrices of a module, by its name in the model that was trained."""
        return next((rank for pattern, rank in self.ranks if pattern.match(module)), self.rank)

    def find_scale(self, module: str) -> float:
        """What multiplies B A."""
        rank = self.find_rank(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.match(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.has_root_scale else rank)


def read_config(path: Path | str, config: Mapping[str, Any]) -> AdapterConfig:
    """Reads the configuration of an adapter; `path` is the adapter's, for errors.

    Raises AdapterInvalid, which lists all that is wrong or not served.
    """
    rank_name = next((name for name in _RANK_NAMES if name in config), _RANK_NAMES[0])
    rank, alpha = config.get(rank_name), config.get("lora_alpha", _DEFAULT_ALPHA)
    mistakes = [*_list_unserved(config)]
    if not _is_rank(rank):
        mistakes.append(FieldViolation(rank_name, _show(rank), _RANKS))
    if not _is_number(alpha):
        mistakes.append(FieldViolation("lora_alpha", _show(alpha), _NUMBERS))
    if config.get(_RSLORA) not in (None, True, False):
        mistakes.append(FieldViolation(_RSLORA, _show(config[_RSLORA]), "true or false"))
    patterns: dict[str, tuple[tuple[re2.Pattern, Any], ...]] = {}
    for name, accepts, accepted in (
        ("rank_pattern", _is_rank, _RANKS),
        ("alpha_pattern", _is_number, _NUMBERS),
    ):
        given = config.get(name) or {}
        if not isinstance(given, Mapping):
            mistakes.append(FieldViolation(name, _show(given), "an object of patterns of module names"))
            continue
        read: list[tuple[re2.Pattern, Any]] = []
        for text, value in given.items():
            pattern = _compile(text)
            if pattern is None:
                mistakes.append(FieldViolation(name, _show(text), _PATTERNS))
            elif not accepts(value):
                mistakes.append(FieldViolation(f"{name}[{text}]", _show(value), accepted))
            else:
                read.append((pattern, value))
        patterns[name] = tuple(read)
    if mistakes:
        raise AdapterInvalid.listing(path, mistakes)
    return AdapterConfig(
        rank=config[rank_name],
        alpha=alpha,
        has_root_scale=bool(config.get(_RSLORA)),
        ranks=patterns["rank_pattern"],
        alphas=patterns["alpha_pattern"],
    )


def _list_unserved(config: Mapping[str, Any]) -> Iterator[FieldViolation]:
    for name, value in config.items():
        served, reason = _SERVED.get(name, (None, "this variant of LoRA is not served"))
        is_known = name in _SERVED or (name != _RSLORA and _VARIANT.fullmatch(name) is not None)
        if is_known and value and value != served:
            yield FieldViolation(name, _show(value), f"{served or 'unset'}: {reason}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_RESIDUAL):
        yield FieldViolation("init_lora_weights", _show(start), _CONVERTED)


def _compile(text: object) -> re2.Pattern | None:
    """The pattern as PEFT matches it: whole names, or their last parts. None if it is none."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(rf"(.*\.)?({text})$", options)
    except (re2.error, UnicodeEncodeError):
        return None


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_ALPHA


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)[:200]
