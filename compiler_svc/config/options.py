"""Replaces the options of Transformers NeuronX in a document by NeuronConfig's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.findings import Findings
from compiler_svc.config.transformers_neuronx import SECTION, Translation, translate_transformers_neuronx

_NEURON_CONFIG: Final = "neuron_config"

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
