"""Finds names in a valid configuration that apply to nothing in the model, so that a plan counts nothing for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from compiler_svc.config import InferenceConfig
from compiler_svc.models.description import ModelDescription
from compiler_svc.planning.weights import ALL_LINEAR


def find_unmatched(config: InferenceConfig, model: ModelDescription, draft: ModelDescription | None) -> Iterator[str]:
    """Yields a warning for each list of modules of which some name matches none.

    Args:
        draft: The draft model that compiles together with the model.
    """
    neuron = config.neuron_config
    if neuron.lora_config is not None:
        yield from _find_targets(neuron.lora_config.target_modules, model)
    if neuron.quantized or neuron.quantized_mlp_kernel_enabled:
        yield from _find_exclusions("modules_to_not_convert", neuron.modules_to_not_convert, model)
    if neuron.quantized and draft is not None:
        skipped = neuron.draft_model_modules_to_not_convert
        yield from _find_exclusions("draft_model_modules_to_not_convert", skipped, draft)


def _find_targets(targets: tuple[str, ...], model: ModelDescription) -> Iterator[str]:
    linears = [linear for linear in model.linears() if linear.is_adaptable]
    names = {ALL_LINEAR}.union(*((linear.module, linear.name) for linear in linears))
    unmatched = [one for one in targets if one not in names]
    if unmatched:
        modules = dict.fromkeys(linear.module for linear in linears)
        rest = "" if len(unmatched) < len(targets) else "; so adapters take no memory in this plan"
        yield (
            f"neuron_config.lora_config.target_modules: {_list(unmatched)} match no linear layer that adapters may "
            f"change, which are {_list(modules)}, or {ALL_LINEAR}{rest}"
        )


def _find_exclusions(name: str, skipped: Iterable[str], model: ModelDescription) -> Iterator[str]:
    quantizable = [linear.name for linear in model.linears() if linear.is_quantizable]
    unmatched = [part for part in skipped if not any(part in one for one in quantizable)]
    if unmatched:
        yield f"neuron_config.{name}: {_list(unmatched)} are in no name of a module that would be quantized"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
