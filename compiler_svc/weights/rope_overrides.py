"""Replaces the rotary embeddings of a checkpoint's JSON.

transformers 5 keeps them under `rope_parameters`, transformers 4 under `rope_theta` and `rope_scaling`, some families
keep numbers of theirs under other names: either form, if given, replaces the other. Families whose sliding layers have
an embedding of their own keep its base under `rope_local_base_freq`, or both in `rope_parameters`, by kind of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

_THETA: Final = "rope_theta"
_SCALING: Final = "rope_scaling"
_PARAMETERS: Final = "rope_parameters"
_LOCAL_THETA: Final = "rope_local_base_freq"
_NAMES: Final = (_THETA, _SCALING, _PARAMETERS)
_PARTIAL: Final = "partial_rotary_factor"
#: Attributes beside `rope_parameters` that are numbers in it, those of all layers or of those that see everything.
_NUMBERS: Final = {"rotary_emb_base": _THETA, _THETA: _THETA, "rotary_pct": _PARTIAL, _PARTIAL: _PARTIAL}
_FULL, _SLIDING = "full_attention", "sliding_attention"

#: Parameters in the form of transformers 5, by kind of layers; under "" those of all layers.
_Ropes = dict[str, dict[str, Any]]


def list_rope_names(counting: Collection[str]) -> tuple[str, ...]:
    """Attributes that describe a model's rotary embeddings."""
    return (*_NAMES, *(name for name in (*_NUMBERS, _LOCAL_THETA) if name in counting and name not in _NAMES))


def replace_ropes(config: Mapping[str, Any], given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What takes the place of the attributes among `names` in a `config.json` after some of them are replaced.

    If a value is no rotary embedding, that is these attributes themselves, so that the model's reader reports it.
    """
    kinds = (_FULL, _SLIDING) if _LOCAL_THETA in names else ("",)
    current = {name: config[name] for name in names if name in config}
    if not given or not all(_is_rope(name, value, kinds) for name, value in {**current, **given}.items()):
        return {**current, **given}
    ropes = _read_ropes(config, kinds)
    for name in (_SCALING, _PARAMETERS):
        if name in given:
            for kind, nested in _by_kind(given[name], kinds).items():
                kept = {one: ropes[kind][one] for one in (_THETA, _PARTIAL) if one in ropes[kind]}
                ropes[kind] = kept | _read_kind(nested)
    for name, (kind, parameter) in _list_numbers(kinds).items():
        if name in given:
            ropes[kind].pop(parameter, None)
    for kind, numbers in _read_numbers(given, kinds).items():
        ropes[kind] |= numbers
    return {_PARAMETERS: ropes.get("", ropes)}


def find_rope_changes(config: Mapping[str, Any], given: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the given attributes that change a rotary embedding, alone or together."""
    kinds = (_FULL, _SLIDING) if _LOCAL_THETA in names else ("",)

    def read(changes: dict[str, Any]) -> _Ropes:
        others = {name: value for name, value in config.items() if name not in names}
        return _read_ropes(others | replace_ropes(config, changes, names), kinds)

    now, wanted = read({}), read(given)
    alone = {name: value for name, value in given.items() if read({name: value}) != now}
    # One attribute may have an effect only together with another.
    return alone if read(alone) == wanted else given


def _read_ropes(config: Mapping[str, Any], kinds: tuple[str, ...]) -> _Ropes:
    """Reads rotary embeddings of either form in the form of transformers 5, without unset values."""
    nested = config.get(_SCALING) or config.get(_PARAMETERS) or {}
    by_kind = _by_kind(nested, kinds) if isinstance(nested, Mapping) else {}
    return {
        kind: numbers | (_read_kind(by_kind.get(kind)) if isinstance(nested, Mapping) else {})
        for kind, numbers in _read_numbers(config, kinds).items()
    }


def _read_numbers(config: Mapping[str, Any], kinds: tuple[str, ...]) -> _Ropes:
    """The numbers that stand beside `rope_parameters`, by kind."""
    numbers: _Ropes = {kind: {} for kind in kinds}
    for name, (kind, parameter) in _list_numbers(kinds).items():
        if config.get(name) is not None:
            numbers[kind].setdefault(parameter, config[name])
    return numbers


def _list_numbers(kinds: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """The kind of layers and the parameter that each attribute beside `rope_parameters` is for."""
    local = {_LOCAL_THETA: (kinds[1], _THETA)} if len(kinds) > 1 else {}
    return {name: (kinds[0], parameter) for name, parameter in _NUMBERS.items()} | local


def _by_kind(nested: Mapping[str, Any] | None, kinds: tuple[str, ...]) -> Mapping[str, Mapping[str, Any] | None]:
    """An object of parameters by the kind of layers that it is for, or such objects by kind as they are."""
    return nested if nested and set(nested) <= set(kinds) else {kinds[0]: nested}


def _read_kind(nested: Mapping[str, Any] | None) -> dict[str, Any]:
    values = {name: value for name, value in (nested or {}).items() if value is not None}
    kind = values.pop("type", "default")
    return {"rope_type": kind} | values


def _is_rope(name: str, value: object, kinds: tuple[str, ...]) -> bool:
    if name in _NUMBERS or name == _LOCAL_THETA or value is None:
        return True
    if not isinstance(value, Mapping):
        return False
    by_kind = _by_kind(value, kinds)
    # transformers 5 has no parameters for all kinds of layers where these differ.
    is_told_apart = name != _PARAMETERS or len(kinds) == 1 or by_kind is value or not value
    return is_told_apart and all(one is None or isinstance(one, Mapping) for one in by_kind.values())
