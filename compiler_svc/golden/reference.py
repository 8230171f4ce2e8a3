"""A checkpoint's model in transformers, which executables are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pkgutil import resolve_name
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from compiler_svc.models.nested_text import nest_config
from compiler_svc.models.registry import find_family
from compiler_svc.models.sources import Items, Joined, Sliced, Transposed, list_tensors
from compiler_svc.models.transforms import Quantization, quantize
from compiler_svc.sharding.plan import PlannedTensor, plan_weights
from compiler_svc.sharding.values import SourceReader
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tensors import TensorReader
from execution.dtypes import TORCH_DTYPES
from execution.quantized_linear import dequantize

REFERENCE_NAME: Final = f"transformers {transformers.__version__}"


class Reference:
    """A checkpoint's model in transformers, in the dtype of the executables."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        """Loads the whole model into memory; of matrices that are quantized, or become so, what that leaves of them."""
        transformers.utils.logging.disable_progress_bar()
        # Its report of tensors that it does not take: the plan has said so.
        transformers.utils.logging.set_verbosity_error()
        model = resolve_name(find_family(checkpoint.config).reference)
        attributes = deepcopy(nest_config(checkpoint.whole_config, checkpoint.config))
        for one in (attributes, attributes.get("text_config")):
            if one is not None:
                one.pop("quantization_config", None)
        config = model.config_class.from_dict(attributes)
        source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path}
        if quantization is not None or checkpoint.packed:
            source = {"pretrained_model_name_or_path": None, "state_dict": read_dequantized(checkpoint, quantization)}
        if quantization is not None:
            # transformers would tie a quantized head again to the table that is not quantized.
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        self._model = model.from_pretrained(
            **source, config=config, dtype=dtype, attn_implementation="eager", local_files_only=True
        ).eval()

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], num_prompt_tokens: int) -> Iterator[Tensor]:
        """Feeds a prompt and then the later tokens one by one, as generation does; yields logits after the prompt and
        after each later token, f32 [vocab_size].
        """
        # Some rotary embeddings remember the longest sequence that they have seen, so each sequence gets a new one.
        decoder = getattr(self._model.base_model, "language_model", self._model.base_model)
        if hasattr(decoder, "rotary_emb"):
            decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
        steps = [list(tokens[:num_prompt_tokens]), *([token] for token in tokens[num_prompt_tokens:])]
        cache = None
        for step in steps:
            output = self._model(torch.tensor([step]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            yield output.logits[0, -1].float()


def read_dequantized(checkpoint: Checkpoint, quantization: Quantization | None) -> dict[str, Tensor]:
    """Reads a checkpoint's tensors; quantized matrices are float32, and what quantization leaves of them.

    With `quantization`, a head that is tied in the checkpoint becomes a tensor of its own.
    """
    with TensorReader(checkpoint) as reader:
        state = {name: reader.read(name) for name in checkpoint.tensors}
        if quantization is None:
            return state
        description = quantize(checkpoint.description, quantization)
        plan = plan_weights(description, checkpoint, dtype="float32", cast_type="config", tp_degree=1)
        planned = {one.name: one for one in plan.tensors}
        opened = SourceReader(reader)
        if description.is_tied:
            head, table = (
                description.storage.find_name(f"{one.name}.weight") for one in (description.head, description.embedding)
            )
            (stored,) = list_tensors(planned[f"{description.embedding.name}.weight"].spec.source)
            state[table] = state[head] = state[stored]
        widened: set[str] = set()
        for linear in (one for one in description.linears() if one.format):
            items = planned[f"{linear.name}.weight"].spec.source
            assert isinstance(items, Items)
            rows = dequantize(*(_read(opened, planned[f"{linear.name}.{kind}"]) for kind in ("weight", "scale")))
            is_tied = description.is_tied and linear is description.head
            for part in items.matrix.parts if isinstance(items.matrix, Joined) else (items.matrix,):
                assert isinstance(part, Sliced)
                name = head if is_tied else list_tensors(part)[0]
                if name not in widened:
                    state[name] = state[name].to(torch.float32, copy=True)
                    widened.add(name)
                target = state[name].t() if isinstance(part.whole, Transposed) else state[name]
                target[part.start : part.start + part.length], rows = rows[: part.length], rows[part.length :]
    return state


def _read(opened: SourceReader, planned: PlannedTensor) -> Tensor:
    values = torch.empty(planned.rank_shape, dtype=TORCH_DTYPES[planned.dtype])
    opened.open(planned.spec.source, 0)(tuple((0, length) for length in values.shape), values)
    return values
