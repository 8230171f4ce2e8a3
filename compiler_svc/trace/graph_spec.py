"""The graph spec: everything that the graphs of one model depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import msgspec

from bundle.abi.inputs import ADAPTERS, BLOCK_KV, COMPUTED_CONTEXT, LEFT_PADDED, LIVE_ROWS, PROCESSORS, PROMPT_LENGTHS
from bundle.abi.outputs import list_flags
from bundle.abi.tensor import DType
from bundle.manifest import Sampling
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.state import StateSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """A model with the compile-time options that reach its graphs.

    Attributes:
        model: `module:function` that builds the module; see `models.family.Family`.
        dtype: Dtype of the computation, and of the KV cache unless the description says another.
        reduce_dtype: Dtype in which ranks add up their partial results; None for `dtype`.
        num_slots: Rows of the KV cache that requests can hold.
        max_length: Positions that the KV cache holds, in tokens.
        sampling: Parameters for picking tokens. Temperature 0 or top_k 1 without `dynamic` is greedy.
        output_logits: Return logits beside sampled tokens. Graphs without on-device sampling always return logits.
        returns_internal: Whether graphs return the ABI's internal outputs. Graphs that return logits have none.
        optional_inputs: Flags of inputs that the graphs take besides those that the other options imply.
        reads_context: Whether prompts may begin behind tokens that the KV cache holds: chunks, and cached prefixes.
        num_blocks: Blocks of the KV cache, without the scratch block; 0: it is made of slots.
        skips_idle: Whether graphs take the number of live rows, and read no further than rows are long: they are equal
            for all buckets of a submodel that reads the cache. Otherwise attention reads its bucket.
        largest_step: Most tokens of a row in one step, if slots of layers with a window are rings; see
            `StateSpec.count_positions`. 0: all slots and blocks of all layers are alike.
    """

    description: ModelDescription
    model: str
    dtype: DType
    tp_degree: int
    num_slots: int
    max_length: int
    ctx_batch_size: int
    tkg_batch_size: int
    sampling: Sampling
    output_logits: bool
    reduce_dtype: DType | None = None
    padding_side: Literal["right", "left"] = "right"
    returns_internal: bool = False
    optional_inputs: tuple[str, ...] = ()
    reads_context: bool = False
    num_blocks: int = 0
    block_tokens: int = 0
    skips_idle: bool = False
    largest_step: int = 0

    def __post_init__(self) -> None:
        assert (self.num_blocks > 0) == (self.block_tokens > 0), "blocks have a number and a size"
        assert not (self.num_blocks and self.largest_step), "blocks are no rings"
        assert list_flags().issuperset(self.optional_inputs), self.optional_inputs

    def to_json(self) -> dict[str, Any]:
        """Encodes the spec as JSON: the model by its numeric configuration and a rank's tensor names and shapes.

        Of the largest step, only what it makes of the cache counts.
        """
        derived = ("description", "sampling", "largest_step")
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in derived}
        parameters = self.description.parameters(self.tp_degree)
        adapters = {one.name: one.rank_shape(self.tp_degree) for one in self.description.adapter_parameters()}
        formats = {one.name: one.format for one in self.description.linears() if one.format}
        activations = {one.name: one.activations for one in self.description.linears() if one.activations}
        num_spare = int(self.has_spare_positions)
        attention, kept = self.description.states[0].dtype, self.description.states[0].kept
        return (
            own
            | ({} if attention is None else {"attention_dtype": attention})
            | ({} if kept is None else {"kept": asdict(kept)})
            | ({"formats": formats} if formats else {})
            | ({"activations": activations} if activations else {})
            | ({"adapters": adapters} if adapters else {})
            | {
                "numeric_config": self.description.numeric_config,
                "positions": [self.count_positions(state) + num_spare for state in self.description.states],
                "parameters": {one.name: one.rank_shape(self.tp_degree) for one in parameters},
                "sampling": msgspec.to_builtins(self.sampling),
            }
        )

    def count_positions(self, state: StateSpec) -> int:
        """Counts the positions of a layer's slots or blocks."""
        return self.block_tokens or state.count_positions(self.max_length, self.largest_step)

    @property
    def has_spare_positions(self) -> bool:
        """Whether idle rows and padding write to a position behind those of sequences: a row of their own would count
        as much as a sequence. Blocks are small, rings have no such position, and code that skips them writes nothing.
        """
        return not (self.skips_idle or self.num_blocks or self.largest_step)

    @property
    def samples_on_device(self) -> bool:
        """Whether executables return tokens."""
        return self.sampling.mode == "on_device"

    @property
    def is_greedy(self) -> bool:
        """Whether the executables always pick the likeliest token."""
        return not self.sampling.dynamic and (self.sampling.temperature == 0 or self.sampling.top_k == 1)

    @property
    def returns_logits(self) -> bool:
        """Whether executables return logits."""
        return self.output_logits or not self.samples_on_device

    @property
    def flags(self) -> frozenset[str]:
        """The flags of the ABI that the options set for at least one submodel."""
        implied = {
            LEFT_PADDED: self.padding_side == "left",
            BLOCK_KV: self.num_blocks > 0,
            COMPUTED_CONTEXT: self.reads_context,
            LIVE_ROWS: self.skips_idle,
            ADAPTERS: bool(self.description.adapter_parameters()),
            # A step may compute a part of a prompt then.
            PROMPT_LENGTHS: self.reads_context and self.description.prompt_lengths is not None,
            # Requests choose top_k, top_p and temperature inside the executable.
            "sampling_params": self.samples_on_device and self.sampling.dynamic,
            "cuts": PROCESSORS in self.optional_inputs and not self.is_greedy,
            "noise_keys": self.samples_on_device and not self.is_greedy and not self.sampling.deterministic,
            "tokens": self.samples_on_device,
            "logits": self.returns_logits,
            "rank_logits": self.returns_internal and not self.returns_logits,
        }
        return frozenset({*self.optional_inputs, *(flag for flag, is_set in implied.items() if is_set)})
