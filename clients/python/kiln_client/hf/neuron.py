"""The names that scripts for Transformers NeuronX and NxD Inference use, for deployments.

from kiln_client.hf.neuron import KilnForSampling as MistralForSampling
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Self

from torch import Tensor
from transformers import PreTrainedConfig

from kiln_client.hf.model import KilnForCausalLM

#: NxD Inference's attributes, by Transformers NeuronX's names of arguments.
_ATTRIBUTES: Final = {
    "amp": "torch_dtype",
    "n_positions": "seq_len",
    "batch_size": "batch_size",
    "tp_degree": "tp_degree",
}
_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class KilnForSampling(KilnForCausalLM):
    """A deployment with the methods of the models of Transformers NeuronX."""

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **options: Any) -> Self:
        """Takes `amp`, `n_positions`, `batch_size` and `tp_degree`, beside the arguments of `KilnForCausalLM`."""
        said = {_ATTRIBUTES[name]: options.pop(name) for name in _ATTRIBUTES if name in options}
        if (dtype := said.get("torch_dtype")) is not None:
            said["torch_dtype"] = _DTYPES.get(dtype, dtype)
        return super().from_pretrained(model, neuron_config=options.pop("neuron_config", {}) | said, **options)

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
        sequence_length: int,
        start_ids: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        streamer: Any = None,
        stopping_criteria_list: Sequence[Any] | None = None,
    ) -> Tensor:
        """Draws sequences of up to `sequence_length` tokens, prompts included; returns int64 [prompts, length].

        Args:
            input_ids: Prompts without padding, int64 [prompts, length].
            sequence_length: Tokens of the longest sequence.
            start_ids: Must be None: rows begin where their prompts do.
            temperature: Divides the logits.
            top_k: Keeps the k most likely tokens.
            top_p: Keeps the smallest set of tokens whose probability reaches p.
            streamer: Gets prompts and new tokens.
            stopping_criteria_list: A `StoppingCriteriaList`.
        """
        if start_ids is not None:
            raise ValueError("start_ids is set; accepted: None, and generate with an attention_mask for padded prompts")
        drawn: Tensor = self.generate(
            input_ids,
            stopping_criteria=stopping_criteria_list,
            streamer=streamer,
            do_sample=True,
            max_length=sequence_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        return drawn


def HuggingFaceGenerationModelAdapter(config: PreTrainedConfig, model: KilnForCausalLM) -> KilnForCausalLM:  # noqa: N802
    """Gives a model, which has `generate` itself, the configuration of its checkpoint."""
    model.config = config
    return model


def HuggingFaceGenerationAdapter(model: KilnForCausalLM) -> KilnForCausalLM:  # noqa: N802
    """Returns the model, which has `generate` itself."""
    return model
