"""Replaces the options of Transformers NeuronX in a document by NeuronConfig's attributes."""

from __future__ import annotations

import copy
import difflib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.buckets import SHORTEST_BUCKET, halve_buckets
from compiler_svc.config.domains import show
from compiler_svc.config.findings import Findings, Hint
from compiler_svc.config.tables.transformers_neuronx import (
    GUIDE,
    OPTIONS,
    REPLICATED_HEADS,
    SHARD_OVER_HEADS,
    Option,
)
from compiler_svc.models.size_limits import MAX_POSITIONS

SECTION: Final = "transformers_neuronx"
_NEURON_CONFIG: Final = "neuron_config"
_GENERATION_TOP_K: Final = 50


@dataclass(frozen=True)
class Translation:
    """What a section says, in NeuronConfig's words.

    `values` are attributes of NeuronConfig, as a document would give them. `paths` says where each of them comes from,
    by attribute; attributes of attributes behind a dot. Unserved options exist, but not at the values that they have.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    violations: list[FieldViolation] = field(default_factory=list)
    unserved: list[FieldViolation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def locate(self, path: str) -> str:
        """Finds a path of the document, such as `neuron_config.seq_len`, in the section; returns others unchanged."""
        table, _, attribute = path.partition(".")
        for whole in (attribute, attribute.partition(".")[0]):
            if table == _NEURON_CONFIG and whole in self.paths:
                return self.paths[whole] + attribute.removeprefix(whole)
        return path

    def put(self, attribute: str, value: object, name: str) -> None:
        """Gives an attribute the value that the option `name` means."""
        table, _, inside = attribute.partition(".")
        if inside:
            self.values[table][inside] = value
        else:
            self.values[attribute] = value
        self.paths[attribute] = f"{SECTION}.{name}"

    def derive_seq_len(self) -> None:
        """Gives sequences twice the longest prompt if only prompts have lengths, as prompts get half of sequences.

        The library takes the model's positions, which would give models of long contexts an unwanted, large cache.
        """
        prompts = self.values.get("context_encoding_buckets")
        if prompts and "seq_len" not in self.values and 2 * prompts[-1] > SHORTEST_BUCKET:
            seq_len = min(2 * prompts[-1], MAX_POSITIONS)
            self.put("seq_len", seq_len, "context_length_estimate")
            self.notes.append(
                f"{SECTION}.n_positions: unset, so sequences get {seq_len} tokens, twice the longest of "
                f"context_length_estimate, and not the model's positions"
            )

    def refuse(self, name: str, value: object, accepted: str) -> None:
        """Adds a mistake."""
        self.violations.append(_violation(name, value, accepted))


def translate_transformers_neuronx(section: Mapping[str, Any]) -> Translation:
    """Translates a section; NeuronConfig's attributes say later which values are in range. null is unset.

    One number for `n_positions` turns bucketing on with the powers of two from 128 and the number itself; unless
    `context_length_estimate` says otherwise, prompts get half of each token generation bucket.
    """
    translation = Translation()
    _translate_options(translation, section, OPTIONS)
    return translation


def _translate_options(translation: Translation, given: Any, options: Sequence[Option], path: str = "") -> None:
    """Translates the options of the section, or of an option that is an object."""
    known = _take_known(translation, given, options, path)
    for option in options:
        value = known.get(option.name, option.unset)
        if value is not None or option.is_required:
            _translate(translation, option, value, path + option.name)
        if value is not None and option.name in _FOLLOWS:
            _FOLLOWS[option.name](translation, known)


def _take_known(translation: Translation, given: Any, options: Sequence[Option], path: str) -> dict[str, Any]:
    """The options that are set, without the names that are none."""
    if not isinstance(given, Mapping):
        translation.refuse(path.removesuffix("."), given, "an object")
        return {}
    known = [option.name for option in options]
    for name in [name for name in given if name not in known]:
        similar = difflib.get_close_matches(name, known, n=1)
        accepted = f"did you mean {similar[0]!r}?" if similar else f"one of {', '.join(known)}"
        translation.refuse(path + name, given[name], accepted)
    return {name: given[name] for name in known if given.get(name) is not None}


def _translate(translation: Translation, option: Option, value: Any, name: str) -> None:
    if option.inside:
        translation.put(option.becomes, copy.copy(option.whole), name)
        for one in option.inside:
            if "." in one.becomes:
                translation.paths[one.becomes] = f"{SECTION}.{name}.{one.name}"
        _translate_options(translation, value, option.inside, f"{name}.")
    elif option.domain is not None and not option.domain.accepts(value):
        translation.refuse(name, value, option.domain.accepted)
    elif option.hint:
        translation.hints.append(Hint(f"{SECTION}.{name}", value, option.hint))
    elif option.serves:
        if value not in option.serves:
            translation.unserved.append(_violation(name, value, option.served))
    elif option.means is None or value in option.means:
        meant = value if option.domain is None else option.domain.normalize(value)
        _become(translation, option, meant if option.means is None else option.means[value], name)


def _become(translation: Translation, option: Option, value: Any, name: str) -> None:
    if not option.contradicted or option.becomes not in translation.values:
        translation.put(option.becomes, value, name)
    elif (other := translation.values[option.becomes]) != value:
        source = translation.paths[option.becomes].removeprefix(f"{SECTION}.")
        accepted = option.contradicted.format(other=source, said=show(option.find_word(other)))
        translation.refuse(name, option.find_word(value), accepted)


def _derive_buckets(translation: Translation, given: Mapping[str, Any]) -> None:
    if positions := translation.values.get("token_generation_buckets"):
        buckets = positions if len(positions) > 1 else _double_up_to(positions[0])
        translation.put("seq_len", positions[-1], "n_positions")
        translation.put("token_generation_buckets", list(buckets), "n_positions")
        if "context_length_estimate" not in given:
            translation.put("context_encoding_buckets", list(halve_buckets(tuple(buckets))), "n_positions")
        translation.put("enable_bucketing", True, "n_positions")


def _double_up_to(longest: int) -> tuple[int, ...]:
    """Powers of two from 128 that are below `longest`, and `longest`; unlike NxD Inference's, none is left out."""
    powers = itertools.takewhile(lambda length: length < longest, (SHORTEST_BUCKET << n for n in itertools.count()))
    return (*powers, longest)


def _turn_bucketing_on(translation: Translation, _: Mapping[str, Any]) -> None:
    if "context_encoding_buckets" in translation.values and "enable_bucketing" not in translation.values:
        translation.put("enable_bucketing", True, "context_length_estimate")


def _choose_candidates(translation: Translation, _: Mapping[str, Any]) -> None:
    # Greedy sampling has no use for candidates, and a remark on a default would only confuse.
    sampling = translation.values["on_device_sampling_config"]
    if sampling.get("do_sample") or sampling.get("dynamic"):
        sampling.setdefault("top_k", _GENERATION_TOP_K)


#: What follows from an option beside the attribute that it becomes.
_FOLLOWS: Final[Mapping[str, Callable[[Translation, Mapping[str, Any]], None]]] = {
    "n_positions": _derive_buckets,
    "context_length_estimate": _turn_bucketing_on,
    "on_device_generation": _choose_candidates,
}


def validate_head_sharding(
    section: Mapping[str, Any], *, num_key_value_heads: int, tp_degree: int
) -> FieldViolation | None:
    """Checks that a model's KV heads fit the strategy that a section names; None if they do, or if it names none.

    Kiln gives every rank whole KV heads of its own if they can be shared out evenly, and copies if they cannot.
    """
    strategy, can_share = section.get("group_query_attention"), num_key_value_heads % tp_degree == 0
    if strategy == SHARD_OVER_HEADS and not can_share:
        wanted, relation = REPLICATED_HEADS, "no"
    elif strategy == REPLICATED_HEADS and can_share and tp_degree > 1:
        wanted, relation = SHARD_OVER_HEADS, "a"
    else:
        return None
    accepted = (
        f"{wanted!r}: the model's {num_key_value_heads} KV heads are {relation} multiple of tp_degree, which is "
        f"{tp_degree} ({GUIDE}, Grouped-query attention)"
    )
    return _violation("group_query_attention", strategy, accepted)


def _violation(name: str, value: object, accepted: str) -> FieldViolation:
    return FieldViolation(f"{SECTION}.{name}" if name else SECTION, show(value), accepted)


#: Translations, by the path of the configuration that they stand in, such as `` or `fused_spec_config.draft_config.`.
Places = dict[str, Translation]


def expand_options(document: Mapping[str, Any], findings: Findings) -> tuple[dict[str, Any], Places]:
    """Moves the section `transformers_neuronx` into `neuron_config`, also in the draft model's configuration.

    An option that is given in both is a mistake. Validation finds mistakes of values later; `locate` finds them
    in the given document.
    """
    places: Places = {}
    return _expand("", document, findings, places), places


def locate(path: str, places: Places) -> str:
    """Finds the place in the given document of a path of the expanded one."""
    for prefix in sorted(places, key=len, reverse=True):
        if path.startswith(prefix):
            return prefix + places[prefix].locate(path.removeprefix(prefix))
    return path


def _expand(path: str, document: Mapping[str, Any], findings: Findings, places: Places) -> dict[str, Any]:
    expanded = dict(document)
    section = expanded.pop(SECTION, None)
    if isinstance(section, Mapping):
        translation = translate_transformers_neuronx(section)
        places[path] = translation
        findings.mistakes += [_below(path, violation) for violation in translation.violations]
        findings.unserved += [_below(path, violation) for violation in translation.unserved]
        given = expanded.get(_NEURON_CONFIG)
        if given is None or isinstance(given, Mapping):
            if (given or {}).get("seq_len") is None:
                translation.derive_seq_len()
            findings.warnings += [f"{path}{note}" for note in translation.notes]
            for hint in translation.hints:
                findings.add_hint(replace(hint, field=f"{path}{hint.field}"))
            expanded[_NEURON_CONFIG] = _join(path, dict(given or {}), translation, findings)
    elif section is not None:
        findings.add_mistake(f"{path}{SECTION}", section, "an object")
    fused = expanded.get("fused_spec_config")
    if isinstance(fused, Mapping) and isinstance(fused.get("draft_config"), Mapping) and not path:
        place = "fused_spec_config.draft_config."
        draft = _expand(place, fused["draft_config"], findings, places)
        expanded["fused_spec_config"] = {**fused, "draft_config": draft}
    return expanded


def _join(path: str, given: dict[str, Any], translation: Translation, findings: Findings) -> dict[str, Any]:
    for name, value in translation.values.items():
        if given.get(name) is not None:
            place = f"{path}{translation.locate(f'{_NEURON_CONFIG}.{name}')}"
            findings.add_mistake(place, value, f"unset, because {path}{_NEURON_CONFIG}.{name} is set")
        else:
            given[name] = value
    return given


def _below(path: str, violation: FieldViolation) -> FieldViolation:
    return replace(violation, field=f"{path}{violation.field}") if path else violation
