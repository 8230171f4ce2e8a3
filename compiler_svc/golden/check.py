"""The golden check itself: runs short random prompts through every executable and through the reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

import torch
import transformers
from torch import Tensor

from bundle.manifest import DType, Executable, Manifest
from compiler_svc.golden.comparison import TOLERANCES, GoldenComparison
from compiler_svc.golden.steps import Steps, loaded_steps
from compiler_svc.models.registry import find_family
from compiler_svc.weights.checkpoint import Checkpoint
from execution.dtypes import TORCH_DTYPES
from execution.ranks.forkservers import OpenForkserver
from execution.step import StepForm

#: Number of tokens in the shortest prompt, and of tokens fed one by one after each prompt.
SHORT_PROMPT_TOKENS: Final = 8
NUM_STEPS: Final = 4


@dataclass(frozen=True)
class GoldenSequence:
    """The token ids of one sequence: a prompt of `num_prompt_tokens`, then tokens fed one by one."""

    num_prompt_tokens: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class GoldenResult:
    """The record of a passed check."""

    reference: str
    dtype: DType
    tolerance: float
    executables: tuple[GoldenComparison, ...]
    sequences: tuple[GoldenSequence, ...]


def check_golden(
    manifest: Manifest,
    blob_path: Callable[[str], Path],
    checkpoint: Checkpoint,
    open_forkserver: OpenForkserver | None = None,
) -> GoldenResult:
    """Compares every executable of a bundle with the reference.

    Each context_encoding executable gets the shortest prompt that needs its bucket, within the bundle's limits. A few
    more tokens follow through token_generation: through every bucket after the first prompt, through the smallest that
    fits after the others.

    Args:
        manifest: A bundle with weights; it need not be published.
        blob_path: Returns the path of an executable's or a weight shard's blob for its digest.
        checkpoint: The checkpoint that the bundle was compiled from.
        open_forkserver: Returns the forkserver for processes of several ranks; None lets them start their own.

    Raises:
        GoldenMismatch: An executable's outputs differ from the reference.
        ExecutionError: An executable cannot be loaded or run.
    """
    with loaded_steps(manifest, blob_path, open_forkserver) as steps:
        check = _Check(manifest, steps, checkpoint)
        for context in check.contexts:
            check.run_sequence(context)
    return GoldenResult(
        REFERENCE_NAME, check.dtype, check.tolerance, tuple(check.comparisons.values()), tuple(check.sequences)
    )


class _Check:
    """A golden check in progress."""

    def __init__(self, manifest: Manifest, steps: Steps, checkpoint: Checkpoint) -> None:
        self.dtype = manifest.state.tensors[0].dtype
        self.tolerance = TOLERANCES[self.dtype]
        self.comparisons = {executable.tag: GoldenComparison(executable.tag) for executable in manifest.executables}
        self.contexts = manifest.executables_of("context_encoding")
        self._generators = manifest.executables_of("token_generation")
        self._manifest = manifest
        self._steps = steps
        self._reference = Reference(checkpoint, TORCH_DTYPES[self.dtype])
        # Seeded, so that every check uses the same prompts.
        self._random = random.Random(0)
        self.sequences: list[GoldenSequence] = []

    def run_sequence(self, context: Executable) -> None:
        """Encodes a prompt and feeds a few tokens."""
        generators = self._generators
        num_prompt_tokens = self._choose_prompt_length(context)
        longest = min(generators[-1].bucket[0], self._manifest.limits.max_length) if generators else 0
        num_tokens = max(num_prompt_tokens, min(num_prompt_tokens + NUM_STEPS, longest))
        tokens = [self._random.randrange(self._manifest.tokens.vocab_size) for _ in range(num_tokens)]
        num_slots = min(self._manifest.state.num_slots, self._manifest.limits.tkg_batch_size)
        slot = len(self.sequences) % num_slots
        expected = self._reference.run(tokens, num_prompt_tokens)
        self._run(context, tokens[:num_prompt_tokens], row=0, start=0, slot=slot, expected=next(expected))
        for position, logits in zip(range(num_prompt_tokens, num_tokens), expected, strict=True):
            fitting = [generator for generator in generators if generator.bucket[0] > position]
            # Feeding a token again writes the same keys and values, so each bucket can compute the same token.
            for generator in fitting[: 1 if self.sequences else None]:
                self._run(
                    generator, tokens[position : position + 1], row=slot, start=position, slot=slot, expected=logits
                )
        self.sequences.append(GoldenSequence(num_prompt_tokens, tuple(tokens)))

    def _choose_prompt_length(self, context: Executable) -> int:
        smaller = [other.bucket[0] for other in self.contexts if other.bucket[0] < context.bucket[0]]
        if smaller:
            wanted = max(smaller) + 1
        else:
            smallest = min(executable.bucket[0] for executable in self._manifest.executables)
            wanted = max(1, min(SHORT_PROMPT_TOKENS, smallest - NUM_STEPS))
        limits = self._manifest.limits
        return min(wanted, limits.max_context_length, limits.max_length)

    def _run(
        self, executable: Executable, tokens: Sequence[int], *, row: int, start: int, slot: int, expected: Tensor
    ) -> None:
        """Computes the tokens of one row, with all others idle, and compares the outputs after the last token."""
        form = StepForm(self._manifest, executable)
        inputs = form.make_idle()
        form.put_tokens(inputs, row, tokens, start=start, slot=slot)
        outputs = self._steps.run(executable, inputs)
        self.comparisons[executable.tag] = self.comparisons[executable.tag].with_step(
            {name: output[row] for name, output in outputs.items()},
            expected,
            position=start + len(tokens) - 1,
            tolerance=self.tolerance,
            sampling=self._manifest.sampling,
        )


REFERENCE_NAME: Final = f"transformers {transformers.__version__}"


class Reference:
    """A checkpoint's model in transformers, in the dtype of the executables."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Loads the whole model into memory."""
        transformers.utils.logging.disable_progress_bar()
        model = resolve_name(find_family(checkpoint.config).reference)
        self._model = model.from_pretrained(
            checkpoint.path,
            config=model.config_class.from_dict(deepcopy(dict(checkpoint.config))),
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
        # Some rotary embeddings remember the longest sequence that they have seen, so each sequence gets a new one.
        decoder = self._model.model
        decoder.rotary_emb = type(decoder.rotary_emb)(self._model.config)
        steps = [list(tokens[:num_prompt_tokens]), *([token] for token in tokens[num_prompt_tokens:])]
        cache = None
        for step in steps:
            output = self._model(torch.tensor([step]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            yield output.logits[0, -1].float()
