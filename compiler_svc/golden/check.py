"""The golden check itself: runs token sequences through every executable and through the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bundle.abi.formats import ACTIVATION_FORMATS
from bundle.abi.inputs import BLOCK_KV, COMPUTED_CONTEXT, LIVE_ROWS
from bundle.abi.outputs import OUTPUTS
from bundle.abi.tensor import DType
from bundle.manifest import Executable, Manifest
from compiler_svc.adapters.files import Adapter
from compiler_svc.golden.adapter import draw_adapter, put_adapter
from compiler_svc.golden.comparison import ACTIVATION_TOLERANCES, TOLERANCES, WEIGHT_TOLERANCES, GoldenComparison
from compiler_svc.golden.reference import REFERENCE_NAME, Reading, Reference
from compiler_svc.golden.sequences import GoldenSequence, choose_sequences
from compiler_svc.golden.steps import Steps, loaded_steps
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.transforms import UNCHANGED, ModelChanges
from compiler_svc.records import GoldenMethod
from compiler_svc.weights.checkpoint import Checkpoint
from execution.dtypes import TORCH_DTYPES
from execution.ranks.forkservers import OpenForkserver
from execution.step import StepForm
from targets.cpu import AOTI


@dataclass(frozen=True)
class GoldenResult:
    """The record of a passed check. `max_deviation` is the largest of a logit over all executables, as a share of the
    largest reference logit; None if none returns logits, as those that v0.1 compiled to return tokens only.
    `adapter_rank` is that of the adapter with which the first sequence was computed, too; 0: there is no room for one.
    """

    method: GoldenMethod
    reference: str
    dtype: DType
    tolerance: float
    max_deviation: float | None
    num_prompts: int
    num_tokens: int
    executables: tuple[GoldenComparison, ...]
    sequences: tuple[GoldenSequence, ...]
    adapter_rank: int = 0

    @property
    def summary(self) -> str:
        """The result in one line, for people."""
        by = "" if self.method == "executables" else ", computed by XLA on the CPU"
        counts = f"{self.num_prompts} prompts, {self.num_tokens} tokens{by}"
        if self.adapter_rank:
            counts += f", also with an adapter of rank {self.adapter_rank}"
        if self.max_deviation is None:
            return f"{counts}, whose greedy tokens are those of {self.reference}"
        return f"{counts}, logits within {self.max_deviation:.1e} of {self.reference}"


def check_golden(
    manifest: Manifest,
    blob_path: Callable[[str], Path],
    checkpoint: Checkpoint,
    open_forkserver: OpenForkserver | None = None,
    changes: ModelChanges = UNCHANGED,
) -> GoldenResult:
    """Compares the logits and the tokens of every executable of a bundle with the reference.

    Prompts run through context_encoding, and a few more tokens through token_generation: through every bucket after the
    first prompt, through the smallest that fits after the others; see `sequences.choose_sequences`. If there is room
    for adapters, the first sequence runs again with a random one, which the reference adds to its modules.

    The bundle has weights; it need not be published. `open_forkserver` returns the forkserver for processes of several
    ranks; None lets them start their own. `changes` are what the bundle's description has of the checkpoint's.
    """
    with loaded_steps(manifest, blob_path, open_forkserver) as steps:
        return compare_steps(manifest, steps, checkpoint, changes=changes)


def compare_steps(
    manifest: Manifest,
    steps: Steps,
    checkpoint: Checkpoint,
    *,
    method: GoldenMethod = "executables",
    changes: ModelChanges = UNCHANGED,
) -> GoldenResult:
    """Does the same as `check_golden`, with steps of what stands for the executables, which have an empty KV cache."""
    check = _Check(manifest, steps, checkpoint, changes)
    sequences = choose_sequences(manifest)
    for number, sequence in enumerate(sequences):
        check.run_sequence(number, sequence)
    description = changes.apply(checkpoint.description)
    adapter = draw_adapter(description, check.dtype)
    if adapter is not None:
        check.run_adapter(adapter, description, sequences[0])
    comparisons = tuple(check.comparisons.values())
    return GoldenResult(
        method=method,
        reference=REFERENCE_NAME,
        dtype=check.dtype,
        tolerance=check.tolerance,
        max_deviation=max((one.max_deviation for one in comparisons if one.max_deviation is not None), default=None),
        num_prompts=len(sequences),
        num_tokens=sum(len(sequence.tokens) for sequence in sequences),
        executables=comparisons,
        sequences=sequences,
        adapter_rank=0 if adapter is None else adapter.config.rank,
    )


class _Check:
    def __init__(self, manifest: Manifest, steps: Steps, checkpoint: Checkpoint, changes: ModelChanges) -> None:
        kept: DType = manifest.state.tensors[0].dtype
        self.dtype: DType = manifest.config.get("neuron_config", {}).get("torch_dtype", kept)
        kind = ACTIVATION_FORMATS.get(changes.quantization.activations) if changes.quantization else None
        of_activations = 0.0 if kind is None else ACTIVATION_TOLERANCES[kind.item]
        of_weights = 0.0
        if changes.quantization and {executable.format for executable in manifest.executables} == {AOTI.name}:
            of_weights = WEIGHT_TOLERANCES.get(changes.quantization.item, 0.0)
        # Attention may compute in a dtype of its own, and keep keys and values in another: the coarsest one counts.
        self.tolerance = max(TOLERANCES[self.dtype], TOLERANCES[kept]) + of_activations + of_weights
        self.comparisons = {executable.tag: GoldenComparison(executable.tag) for executable in manifest.executables}
        self._executables = {executable.tag: executable for executable in manifest.executables}
        self._generators = manifest.executables_of("token_generation")
        self._manifest = manifest
        self._steps = steps
        self._reference = Reference(checkpoint, TORCH_DTYPES[self.dtype], changes)
        self._adapter_slot = -1

    def run_adapter(self, adapter: Adapter, description: ModelDescription, sequence: GoldenSequence) -> None:
        """Runs a sequence with an adapter in the last slot."""
        slot = self._manifest.symbols_of(self._manifest.executables[0])["last_adapter"]
        put_adapter(
            adapter, description, slot, self._steps.write_adapter, dtype=self.dtype, tp_degree=self._manifest.tp_degree
        )
        self._adapter_slot = slot
        with self._reference.adapted(adapter, description):
            self.run_sequence(0, sequence)

    def run_sequence(self, number: int, sequence: GoldenSequence) -> None:
        """Encodes a prompt and feeds a few tokens. The sequences of a check take turns in rows and slots."""
        context, tokens = self._executables[sequence.context], sequence.tokens
        prompt = tokens[: sequence.num_prompt_tokens]
        num_slots = self._manifest.state.num_slots
        reads_any_slot = bool({BLOCK_KV, LIVE_ROWS} & set(context.flags))
        if not reads_any_slot:
            # Executables of earlier releases: row r of token_generation reads slot r.
            num_slots = min(num_slots, self._manifest.limits.tkg_batch_size)
        slot = num_slots - 1 - number % num_slots
        expected = self._reference.run(tokens, len(prompt))
        row, after_prompt = number % context.batch_size, next(expected)
        says_more = any(OUTPUTS[spec.name].is_reported for spec in context.outputs)
        reading = self._reference.read(prompt) if says_more else None
        next_id = tokens[len(prompt)] if len(prompt) < len(tokens) else None
        self._run(context, prompt, row=row, start=0, slot=slot, expected=after_prompt, reading=reading, next_id=next_id)
        if COMPUTED_CONTEXT in context.flags:
            # The second half again, behind the first. It writes the same keys and values.
            start = len(prompt) // 2
            reading = None if reading is None else Reading(*(part[start:] for part in reading))
            self._run(
                context,
                prompt[start:],
                row=row,
                start=start,
                slot=slot,
                expected=after_prompt,
                reading=reading,
                next_id=next_id,
            )
        for position, logits in zip(range(len(prompt), len(tokens)), expected, strict=True):
            fitting = [generator for generator in self._generators if generator.bucket[0] > position]
            # Feeding a token again writes the same keys and values, so each bucket can compute the same token.
            for generator in fitting[: 1 if number else None]:
                token = tokens[position : position + 1]
                row = number % generator.batch_size if reads_any_slot else slot
                self._run(generator, token, row=row, start=position, slot=slot, expected=logits)

    def _run(
        self,
        executable: Executable,
        tokens: Sequence[int],
        *,
        row: int,
        start: int,
        slot: int,
        expected: Tensor,
        reading: Reading | None = None,
        next_id: int | None = None,
    ) -> None:
        """Computes the tokens of one row, with all others idle; compares the outputs after the last token, and what the
        step says of all if there is a reading of them.
        """
        form = StepForm(self._manifest, executable)
        inputs = form.make_idle()
        blocks = self._find_blocks(slot, start + len(tokens))
        form.put_tokens(inputs, row, tokens, start=start, blocks=blocks, next_id=next_id)
        form.put_values(inputs, "adapter_ids", row, [self._adapter_slot])
        outputs = self._steps.run(executable, inputs)
        of_row = {name: output[row] for name, output in outputs.items()}
        comparison = self.comparisons[executable.tag].with_step(
            of_row,
            expected,
            position=start + len(tokens) - 1,
            tolerance=self.tolerance,
            sampling=self._manifest.sampling,
        )
        if reading is not None:
            next_ids = [*tokens[1:], *([] if next_id is None else [next_id])]
            comparison = comparison.with_prompt(of_row, reading, next_ids, start=start, tolerance=self.tolerance)
        self.comparisons[executable.tag] = comparison

    def _find_blocks(self, slot: int, num_tokens: int) -> Sequence[int]:
        """Blocks for a sequence's first tokens: the slot, or every block in turn from the slot's number down."""
        state = self._manifest.state
        if not state.num_blocks:
            return (slot,)
        return [(slot - number) % state.num_blocks for number in range(-(-num_tokens // state.block_tokens))]
