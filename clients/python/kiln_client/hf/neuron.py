"""The names that scripts for Transformers NeuronX and NxD Inference use, for deployments.

from kiln_client.hf.neuron import KilnForSampling as MistralForSampling
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kiln_client.hf.model import KilnForCausalLM

#: NxD Inference's attributes, by Transformers NeuronX's names of arguments.
_ATTRIBUTES: Final = {
    "amp": "torch_dtype",
    "n_positions": "seq_len",
    "context_length_estimate": "max_context_length",
    "batch_size": "batch_size",
    "tp_degree": "tp_degree",
}
#: What `sample` draws by, unless it is told otherwise.
_DRAW: Final = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class KilnForSampling(KilnForCausalLM):
    """A deployment with the methods of the models of Transformers NeuronX.

    Attributes:
        num_outputs: Sequences that `sample` draws for each prompt.
    """

    num_outputs = 1

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, prompt_batch_size: int | None = None, **options: Any
    ) -> Self:
        """Takes a checkpoint and the deployment that serves it, as `KilnForCausalLM` does.

        Args:
            model: Directory of a checkpoint, or its id of the Hub.
            prompt_batch_size: Prompts for which `sample` draws `batch_size` sequences. Default: as many.
            options: `amp`, `n_positions`, `context_length_estimate`, `batch_size` and `tp_degree`, which say how the
                checkpoint is compiled, and the arguments of `KilnForCausalLM`.
        """
        batch_size = options.get("batch_size", 1) if prompt_batch_size is None else options.pop("batch_size", 1)
        said = {_ATTRIBUTES[name]: options.pop(name) for name in _ATTRIBUTES if name in options}
        if (dtype := said.get("torch_dtype")) is not None:
            said["torch_dtype"] = _DTYPES.get(dtype, dtype)
        if prompt_batch_size is not None and options.get("deployment_id") is None:
            said["batch_size"] = batch_size
        made = super().from_pretrained(
            model, neuron_config={**(options.pop("neuron_config", None) or {}), **said}, **options
        )
        made.num_outputs = 1 if prompt_batch_size is None else batch_size // prompt_batch_size
        return made

    def to_neuron(self) -> None:
        """Has no effect: the checkpoint is compiled and loaded."""

    def reset_generation(self) -> None:
        """Has no effect: each call begins sequences of its own."""

    @property
    def neuron_config(self) -> SimpleNamespace:
        """Sizes of the deployment: `max_length`, `seq_len`, in tokens, and `batch_size`, in sequences."""
        sizes = self.deployment.capabilities
        return SimpleNamespace(max_length=sizes.max_length, seq_len=sizes.max_length, batch_size=sizes.max_batch_size)

    def sample(
        self,
        input_ids: Tensor,
        sequence_length: int | None = None,
        start_ids: Tensor | None = None,
        *,
        streamer: Any = None,
        stopping_criteria_list: Sequence[Any] | None = None,
        **parameters: Any,
    ) -> Tensor:
        """Draws sequences; returns them with their prompts, int64 [prompts * num_outputs, length].

        Args:
            input_ids: Prompts, int64 [prompts, length].
            sequence_length: Most tokens of a sequence, its prompt included. Default: as many as the deployment has.
            start_ids: Where each prompt begins, behind padding, int64 [prompts]. Default: at 0.
            streamer: Gets prompts and new tokens.
            stopping_criteria_list: A `StoppingCriteriaList`.
            parameters: Such as `temperature`, `top_k`, `top_p` and `no_repeat_ngram_size`, as of `generate`.
        """
        starts = torch.zeros_like(input_ids[:, 0]) if start_ids is None else start_ids
        asked = {
            "attention_mask": (torch.arange(input_ids.shape[1]) >= starts[:, None]).long(),
            "do_sample": True,
            "max_length": sequence_length or self.deployment.capabilities.max_length,
            "num_return_sequences": self.num_outputs,
            "streamer": streamer,
            "stopping_criteria": stopping_criteria_list,
        }
        drawn: Tensor = self.generate(input_ids, **asked | _DRAW | parameters)
        return drawn


def HuggingFaceGenerationModelAdapter(config: PreTrainedConfig, model: KilnForCausalLM) -> KilnForCausalLM:  # noqa: N802
    """Gives a model, which has `generate` itself, the configuration of its checkpoint."""
    model.config = config
    return model


def HuggingFaceGenerationAdapter(model: KilnForCausalLM) -> KilnForCausalLM:  # noqa: N802
    """Returns the model, which has `generate` itself."""
    return model
