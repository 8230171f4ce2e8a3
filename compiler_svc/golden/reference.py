"""The reference: the checkpoint in transformers, run without compilation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Final

import torch
import transformers
from torch import Tensor

from compiler_svc.weights.checkpoint import Checkpoint

REFERENCE_NAME: Final = f"transformers {transformers.__version__}"


class Reference:
    """A checkpoint's model in transformers, in the dtype of the executables."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Loads the whole model into memory, as the checkpoint's configuration has it."""
        transformers.utils.logging.disable_progress_bar()
        self._model = transformers.LlamaForCausalLM.from_pretrained(
            checkpoint.path,
            config=transformers.LlamaConfig.from_dict(deepcopy(dict(checkpoint.config))),
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
        ).eval()

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], num_prompt_tokens: int) -> Iterator[Tensor]:
        """Feeds a prompt and then the later tokens one by one, as generation does.

        Yields:
            Logits after the prompt and after each later token, f32 [vocab_size].
        """
        # Some rotary embeddings remember the longest sequence they met: each sequence gets a new one.
        decoder = self._model.model
        decoder.rotary_emb = type(decoder.rotary_emb)(self._model.config)
        steps = [list(tokens[:num_prompt_tokens]), *([token] for token in tokens[num_prompt_tokens:])]
        cache = None
        for step in steps:
            output = self._model(torch.tensor([step]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            yield output.logits[0, -1].float()
