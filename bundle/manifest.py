"""The bundle manifest: everything that a runtime needs to know about a bundle, as data.

The manifest holds reproducible fields only, so that equal inputs give equal digests. The config blob of the OCI image
manifest holds it as canonical JSON (RFC 8785), and so does the layer `manifest.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self

import msgspec

from bundle.abi.inputs import PROCESSORS, PromptLengths
from bundle.abi.neff import NeffProgram
from bundle.abi.outputs import LOGITS
from bundle.abi.state import StateLayout
from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import AbiTensor, DType, Symbol, Symbols
from bundle.digest import Digest, canonical_json

ABI_VERSION: Final = 1

#: How a weight shard arranges the items of a tensor.
TensorLayout = Literal["row_major"]
TargetKind = Literal["cpu", "inf2", "trn1", "trn2", "trn3"]
StateConvention = Literal["in_place", "functional", "aliased"]
#: Not an enumeration, because other distributions may add formats; `targets` knows those that can run here.
FormatName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable record that ignores unknown fields."""


class Target(_Record, frozen=True, omit_defaults=True):
    """The hardware for which the executables are made."""

    kind: TargetKind
    #: Instruction set, such as `x86-64-v3`; empty on Neuron targets.
    isa: str
    #: Neuron targets: the generation of cores as the NEFFs' `kelf-0.json` names it, such as `cayman` (trn2).
    architecture: str = ""
    #: Neuron targets: physical cores of a logical core; 0 elsewhere.
    lnc: int = 0


class TensorSpec(_Record, frozen=True):
    """Name, dtype and static shape of an input or output."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: AbiTensor, symbols: Symbols, *, computed: DType = "float32") -> Self:
        """Describes an input or output of the ABI in an executable that computes in the dtype `computed`."""
        dtype = computed if tensor.dtype == "computed" else tensor.dtype
        return cls(name=tensor.name, dtype=dtype, shape=tensor.shape(symbols))


class ConstantBinding(_Record, frozen=True):
    """The weight tensor for a constant of an executable."""

    #: Name of the constant in the executable: the parameter's name in the exported graph.
    name: str
    #: Weight set that holds the tensor.
    weight_set: str
    #: Tensor of the weight set.
    tensor: str


class Executable(_Record, frozen=True, omit_defaults=True):
    """One compiled program for one (submodel, bucket).

    An executor calls it with its inputs and then its state, in the order given here. Under the state convention
    `in_place` it writes the state in place and returns the outputs; under `functional` it does not change its arguments
    and returns the outputs and then the new state. Under `aliased`, `neff` says which outputs share memory with inputs.
    """

    #: `submodel_bucket`, unique in the bundle, such as `token_generation_256`.
    tag: str
    submodel: SubmodelName
    #: Static shape in tokens: `(tokens,)`, or `(prefill, prefix)`.
    bucket: tuple[int, ...]
    #: Rows of one step.
    batch_size: int
    #: Name of the blob's format; see `targets.target.ExecutableFormat`.
    format: FormatName
    state_convention: StateConvention
    #: Digest of the blob, equal for all ranks.
    blob: Digest
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Names of the state tensors, in calling order.
    state: tuple[str, ...]
    constants: tuple[ConstantBinding, ...]
    #: Digest of the exported graph.
    graph_digest: Digest
    #: Options that the runtime must know, from `bundle.abi.outputs.list_flags`, sorted.
    flags: tuple[str, ...]
    #: How to call the blob under the state convention `aliased`; None under the others.
    neff: NeffProgram | None = None

    @property
    def num_row_tokens(self) -> int:
        """Tokens of a row."""
        return next(spec.shape[1] for spec in self.inputs if spec.name == "input_ids")

    @property
    def leaves_logits(self) -> bool:
        """Whether its rank can pick tokens from what it returns, whether or not it has picked some itself."""
        return not LOGITS.isdisjoint(self.flags)

    @property
    def num_row_blocks(self) -> int:
        """Blocks of a row's block table; 1 in an executable whose KV cache is made of slots."""
        return next((spec.shape[1] for spec in self.inputs if spec.name == "active_block_table"), 1)


class WeightTensor(_Record, frozen=True, omit_defaults=True):
    """One tensor of a weight shard; its offset is in the safetensors header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: TensorLayout = "row_major"


class WeightShard(_Record, frozen=True):
    """The weights of one rank: a safetensors blob. Without a blob, the tensors that a later blob must hold."""

    rank: int
    blob: Digest | None
    #: Bytes of the blob; 0 without one.
    size_bytes: int
    tensors: tuple[WeightTensor, ...]

    def entry(self) -> Self:
        """What a file of one entry of a mutable set holds for the rank: its tensors without their first axis."""
        tensors = tuple(msgspec.structs.replace(one, shape=one.shape[1:]) for one in self.tensors)
        return msgspec.structs.replace(self, tensors=tensors)


#: The weight set of the model itself, which LoadWeights replaces.
MODEL_WEIGHTS: Final = "model"
#: The mutable weight set of LoRA adapters. The first axis of each of its tensors is the adapter's slot.
ADAPTER_WEIGHTS: Final = "adapters"


class WeightSet(_Record, frozen=True, omit_defaults=True):
    """Weights that belong together, one shard for each rank. A plain model has only the set `MODEL_WEIGHTS`.

    A mutable set has no blobs: executors make its tensors, of zeros, and write them between steps.
    """

    name: str
    shards: tuple[WeightShard, ...]
    is_mutable: bool = False


class BundledAdapter(_Record, frozen=True):
    """A LoRA adapter of the model, as each rank writes it into a slot of `ADAPTER_WEIGHTS`."""

    #: What requests call it, where LoadAdapter gives it no other name.
    name: str
    #: Of its numbers: equal for equal adapters, however slots and ranks divide them.
    digest: Digest
    #: The tensors of a slot: names, dtypes and shapes are those of the set, without the first axis.
    shards: tuple[WeightShard, ...]


class Sampling(_Record, frozen=True, omit_defaults=True):
    """How tokens are picked."""

    #: `on_device` executables return tokens; after `host` ones the executor samples from their logits.
    mode: Literal["on_device", "host"]
    semantics: Literal["hf"]
    #: Whether requests choose top_k, top_p and temperature; otherwise the defaults here are baked in.
    dynamic: bool
    deterministic: bool
    #: Number of the likeliest tokens that are candidates; 0 is the whole vocabulary.
    global_topk: int
    #: Defaults for requests. Temperature 0 is greedy.
    temperature: float
    top_k: int
    top_p: float
    #: The input that decides between candidates: `rand` with bundles of earlier releases.
    chance: Literal["noise_keys", "rand"] = "rand"


class Limits(_Record, frozen=True):
    """Sizes that admission checks, in tokens and rows."""

    max_context_length: int
    max_length: int
    #: None: as many as `max_length` allows.
    max_new_tokens: int | None
    ctx_batch_size: int
    tkg_batch_size: int


class GenerationDefaults(_Record, frozen=True, omit_defaults=True):
    """Sampling values that the checkpoint names for requests that set none; None if it does not name one."""

    #: 0 is greedy.
    temperature: float | None = None
    #: 0 keeps all candidates.
    top_k: int | None = None
    #: In (0, 1].
    top_p: float | None = None
    #: These and those below only with bundles that serve processors.
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


AdapterEviction = Literal["lru", "lfu"]
DEFAULT_HOST_ADAPTERS: Final = 100


class Serving(_Record, frozen=True, omit_defaults=True):
    """Options for the runtime, not the executables. One at its default is not written, so that old digests stay."""

    #: Cut prompts that are too long and keep their end; otherwise the runtime refuses them.
    input_truncation: bool = False
    #: Do not run every executable once after loading.
    skip_warmup: bool = False
    #: Let requests with equal beginnings share the blocks of the KV cache that hold these.
    prefix_caching: bool = False
    #: Which requests with equal beginnings have equal keys; None: all.
    prompt_lengths: PromptLengths | None = None
    #: Take precedence over the defaults in `sampling`; None if requests cannot choose, or the checkpoint names nothing.
    generation: GenerationDefaults | None = None
    #: Which adapter makes room for another: the one unused for longest, or used least.
    adapter_eviction: AdapterEviction = "lru"
    #: Adapters that ranks keep in the host's memory, ready to be written into slots.
    max_host_adapters: int = DEFAULT_HOST_ADAPTERS


class Tokens(_Record, frozen=True):
    """Token ids with a special meaning."""

    vocab_size: int
    bos: int | None
    #: All tokens that end a sequence.
    eos: tuple[int, ...]
    pad: int


class TokenizerFile(_Record, frozen=True):
    """One file of the tokenizer."""

    title: str
    blob: Digest


#: The chat template of requests that name none; see `choose_template`.
DEFAULT_CHAT_TEMPLATE: Final = "default"
#: The chat template of requests that name none and offer tools, if there is one of this name.
TOOLS_CHAT_TEMPLATE: Final = "tool_use"


class Tokenizer(_Record, frozen=True, omit_defaults=True):
    """The tokenizer. `digest` is that of `tokenizer.json`; bundles with equal digests agree on token ids."""

    digest: Digest
    files: tuple[TokenizerFile, ...]
    #: Jinja source of the default chat template; None if the checkpoint has none.
    chat_template: str | None
    #: Jinja source of each other chat template, by name.
    chat_templates: dict[str, str] = {}

    @property
    def all_templates(self) -> dict[str, str]:
        """Jinja source of every chat template, by name."""
        default = {} if self.chat_template is None else {DEFAULT_CHAT_TEMPLATE: self.chat_template}
        return default | self.chat_templates


def choose_template(names: Collection[str], wanted: str, *, has_tools: bool) -> str | None:
    """Chooses a chat template as transformers does; None if there is none of that name, or no default.

    `wanted` is the name that a request gives, empty if it gives none.
    """
    unnamed = TOOLS_CHAT_TEMPLATE if has_tools and TOOLS_CHAT_TEMPLATE in names else DEFAULT_CHAT_TEMPLATE
    chosen = wanted or unnamed
    return chosen if chosen in names else None


class Manifest(_Record, frozen=True):
    """The description of a bundle."""

    abi_version: int
    #: Hugging Face architecture. For people; the runtime does not interpret it.
    architecture: str
    #: Resolved InferenceConfig: `neuron_config` with every default filled in, and the model's attributes.
    config: dict[str, Any]
    #: Digest of the source checkpoint.
    checkpoint_digest: Digest
    target: Target
    #: Optimization level: 0, 1 or 2.
    optimization_level: int
    #: Versions of everything that shapes the executables, by name.
    toolchain: dict[str, str]
    tp_degree: int
    executables: tuple[Executable, ...]
    weight_sets: tuple[WeightSet, ...]
    state: StateLayout
    sampling: Sampling
    limits: Limits
    tokens: Tokens
    tokenizer: Tokenizer | None
    #: See `bundle.abi.digest.compute_graph_abi_digest`.
    graph_abi_digest: Digest
    serving: Serving = Serving()
    #: Names of `manifest_parser.FEATURES` without which a reader would misunderstand the bundle, sorted.
    required_features: tuple[str, ...] = ()
    #: Adapters that come with the bundle: all that there is, in a bundle without executables and weights.
    adapters: tuple[BundledAdapter, ...] = ()

    @property
    def has_executables(self) -> bool:
        """Whether a runtime can load the bundle. Without executables, it holds weights or adapters for those of another
        bundle.
        """
        return bool(self.executables)

    @property
    def has_weights(self) -> bool:
        """Whether there are weights, and every shard has its blob. Otherwise they come from another bundle."""
        blobs = [shard.blob for shard in self.shards()]
        return bool(blobs) and None not in blobs

    @property
    def serves_processors(self) -> bool:
        """Whether requests may change logits before tokens are picked: in executables, or in ranks."""
        return all(one.leaves_logits for one in self.executables) or any(
            PROCESSORS in one.flags for one in self.executables
        )

    @property
    def num_adapter_slots(self) -> int:
        """Adapters that the ranks hold at once; 0 if the executables have no room for any."""
        # Adapters are the only mutable set that there is.
        tensors = (tensor for shard in self.shards(mutable=True) for tensor in shard.tensors)
        return min((size for tensor in tensors for size in tensor.shape[:1]), default=0)

    def shards(self, *, mutable: bool = False) -> Iterator[WeightShard]:
        """Yields the shards of every rank and weight set: of those that are mutable, or else of all others."""
        return (shard for one in self.weight_sets if one.is_mutable is mutable for shard in one.shards)

    def written_shards(self) -> Iterator[WeightShard]:
        """Yields the shards that files may have: those of all sets that are not mutable, and of adapters."""
        return chain(self.shards(), *(adapter.shards for adapter in self.adapters))

    def executables_of(self, submodel: SubmodelName) -> tuple[Executable, ...]:
        """Executables of one submodel, smallest bucket first."""
        return tuple(sorted((e for e in self.executables if e.submodel == submodel), key=lambda e: e.bucket))

    def symbols_of(self, executable: Executable) -> dict[Symbol, int]:
        """Values of the symbols of the ABI's inputs in an executable."""
        bounds_positions = SUBMODELS[executable.submodel].bucket == "positions"
        # A step writes a token at its position and reads it from the bucket; padding of a prompt may have any position.
        num_positions = executable.bucket[-1] if bounds_positions else self.limits.max_length
        scratch_place = self.state.num_blocks * self.state.block_tokens
        return {
            "R": executable.batch_size,
            "T": executable.num_row_tokens,
            "N": executable.num_row_blocks,
            "V": self.tokens.vocab_size,
            "pad_id": self.tokens.pad,
            "scratch_slot": self.state.num_slots,
            "scratch_block": self.state.num_blocks,
            "scratch_place": scratch_place,
            "last_place": scratch_place + self.state.block_tokens - 1,
            "last_token_id": self.tokens.vocab_size - 1,
            "last_position": num_positions - 1,
            "last_adapter": self.num_adapter_slots - 1,
        }

    def blobs(self) -> frozenset[str]:
        """Returns the digests of all blobs that the manifest names."""
        shards = (shard.blob for shard in self.written_shards() if shard.blob is not None)
        files = (file.blob for file in self.tokenizer.files) if self.tokenizer else ()
        return frozenset((*(executable.blob for executable in self.executables), *shards, *files))

    def to_json(self) -> bytes:
        """Writes canonical JSON: equal manifests give equal bytes. Optional fields at their defaults are left out."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("serving", "required_features", "adapters"):
            if not document[name]:
                del document[name]
        return canonical_json(document)
