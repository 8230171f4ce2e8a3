"""The bundle manifest: everything that a runtime needs to know, as data.

The manifest holds reproducible fields only, so that equal inputs give equal digests. It is stored as canonical JSON
(RFC 8785) in the config blob of the OCI image manifest. Unknown fields, ABI versions, flags and submodels are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self

import msgspec

from bundle.abi.outputs import list_flags
from bundle.abi.submodels import SUBMODELS, SubmodelName
from bundle.abi.tensor import AbiTensor, Symbol, Symbols
from bundle.digest import Digest, canonical_json
from bundle.errors import AbiUnsupported, ManifestInvalid

ABI_VERSION: Final = 1

DType = Literal["float32", "bfloat16", "float16", "int32"]
#: How a weight shard lays the items of a tensor out.
TensorLayout = Literal["row_major"]
TargetKind = Literal["cpu", "inf2", "trn1", "trn2", "trn3"]
StateConvention = Literal["in_place", "functional"]
#: Open, because formats may come from outside; `targets` knows those that can be run.
FormatName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]

#: Bytes of one item.
DTYPE_SIZES_BYTES: Final[Mapping[DType, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4}


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, strict record."""


class Target(_Record, frozen=True):
    """Hardware that the executables are made for."""

    kind: TargetKind
    #: Instruction set, such as `x86-64-v3`.
    isa: str


class TensorSpec(_Record, frozen=True):
    """Name, dtype and static shape of an input or output."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: AbiTensor, symbols: Symbols) -> Self:
        """An input or output of the ABI, in the executable that `symbols` describes."""
        return cls(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape(symbols))


class ConstantBinding(_Record, frozen=True):
    """Says which weight an executable's constant takes."""

    #: Name of the constant in the executable: the parameter's name in the exported graph.
    name: str
    #: Weight set that holds the tensor.
    weight_set: str
    #: Tensor of the weight set.
    tensor: str


class Executable(_Record, frozen=True):
    """One compiled program for one (submodel, bucket).

    An executable is called with its inputs and then its state, in the order given here. Under state convention
    `in_place` it writes the state where it lies and returns the outputs; under `functional` it leaves its arguments
    alone and returns the outputs and then the new state.
    """

    #: `submodel_bucket`, unique in the bundle, such as `token_generation_256`.
    tag: str
    submodel: SubmodelName
    #: Static shape in tokens: `(tokens,)`, or `(prefill, prefix)`.
    bucket: tuple[int, ...]
    #: Rows of one step.
    batch_size: int
    #: How to run the blob; see `targets.target.ExecutableFormat`.
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
    #: Options that the runtime has to know, from `bundle.abi.outputs.list_flags`, sorted.
    flags: tuple[str, ...]

    @property
    def num_row_tokens(self) -> int:
        """Tokens of a row."""
        return next(spec.shape[1] for spec in self.inputs if spec.name == "input_ids")


class WeightTensor(_Record, frozen=True, omit_defaults=True):
    """One tensor of a weight shard; its offset is in the safetensors header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: TensorLayout = "row_major"


class WeightShard(_Record, frozen=True):
    """The weights of one rank: a safetensors blob; or, without one, what a blob that comes later must hold."""

    rank: int
    blob: Digest | None
    #: Bytes of the blob; 0 without one.
    size_bytes: int
    tensors: tuple[WeightTensor, ...]


class WeightSet(_Record, frozen=True):
    """Weights that belong together, one shard a rank. `model` is the only set of a plain model."""

    name: str
    shards: tuple[WeightShard, ...]


class StateTensor(_Record, frozen=True):
    """One tensor of the KV cache of a rank."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    #: Meaning of each axis: `slot`, `kv_head`, `position`, `head_dim`.
    axes: tuple[str, ...]


class StateLayout(_Record, frozen=True):
    """The KV cache of every rank. Rows 0 to `num_slots - 1` are slots; row `num_slots` is the scratch row that idle
    batch rows write."""

    tensors: tuple[StateTensor, ...]
    num_slots: int
    #: For each rank, the checkpoint's KV heads that it holds, in order; -1 is a head of zeros that only pads.
    kv_heads_by_rank: tuple[tuple[int, ...], ...]


class Sampling(_Record, frozen=True):
    """How tokens are picked."""

    #: `on_device` executables return tokens; after `host` ones the executor samples from their logits.
    mode: Literal["on_device", "host"]
    semantics: Literal["hf"]
    #: Whether requests choose top_k, top_p and temperature; otherwise the defaults here are baked in.
    dynamic: bool
    deterministic: bool
    #: Candidates considered; 0 is the whole vocabulary.
    global_topk: int
    #: Defaults of a request that sets nothing. Temperature 0 is greedy.
    temperature: float
    top_k: int
    top_p: float


class Limits(_Record, frozen=True):
    """Sizes that admission checks, in tokens and rows."""

    max_context_length: int
    max_length: int
    #: None: as many as `max_length` leaves.
    max_new_tokens: int | None
    ctx_batch_size: int
    tkg_batch_size: int


class Serving(_Record, frozen=True, omit_defaults=True):
    """What the configuration asks of the runtime and the executables do not show.

    A field at its default is not written, so that a bundle that asks for nothing has the manifest, and the digest, that
    it had before the field was there.
    """

    #: Cut prompts that are too long, keeping their end; otherwise they are refused.
    input_truncation: bool = False
    #: Do not run every executable once after a load.
    skip_warmup: bool = False


class Tokens(_Record, frozen=True):
    """Token ids with a meaning."""

    vocab_size: int
    bos: int | None
    #: All tokens that end a sequence.
    eos: tuple[int, ...]
    pad: int


class TokenizerFile(_Record, frozen=True):
    """One file of the tokenizer."""

    title: str
    blob: Digest


class Tokenizer(_Record, frozen=True):
    """Text in and out. `digest` is the digest of `tokenizer.json`; bundles that share it agree on token ids."""

    digest: Digest
    files: tuple[TokenizerFile, ...]
    #: Jinja source, None if the checkpoint has none.
    chat_template: str | None


class Manifest(_Record, frozen=True):
    """A bundle, described."""

    abi_version: int
    #: Hugging Face architecture; for people, never interpreted by the runtime.
    architecture: str
    #: Resolved InferenceConfig: `neuron_config` with every default filled in, beside the model's attributes.
    config: dict[str, Any]
    #: Digest of the source checkpoint.
    checkpoint_digest: Digest
    target: Target
    #: 0, 1 or 2.
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

    @property
    def has_executables(self) -> bool:
        """Whether the bundle can be loaded; without executables, it holds weights for those of another."""
        return bool(self.executables)

    @property
    def has_weights(self) -> bool:
        """Whether every shard has its blob; without, the weights come from another bundle."""
        return all(shard.blob is not None for shard in self.shards())

    def shards(self) -> Iterator[WeightShard]:
        """The shards of every weight set and rank."""
        return (shard for weight_set in self.weight_sets for shard in weight_set.shards)

    def executables_of(self, submodel: SubmodelName) -> tuple[Executable, ...]:
        """Executables of one submodel, smallest bucket first."""
        return tuple(sorted((e for e in self.executables if e.submodel == submodel), key=lambda e: e.bucket))

    def symbols_of(self, executable: Executable) -> dict[Symbol, int]:
        """What the symbols of the ABI's inputs stand for in an executable."""
        bounds_positions = SUBMODELS[executable.submodel].bucket == "positions"
        # A token is written at its position and read back from the bucket; padding of a prompt may be at any position.
        num_positions = executable.bucket[-1] if bounds_positions else self.limits.max_length
        return {
            "R": executable.batch_size,
            "T": executable.num_row_tokens,
            "V": self.tokens.vocab_size,
            "pad_id": self.tokens.pad,
            "scratch_slot": self.state.num_slots,
            "last_token_id": self.tokens.vocab_size - 1,
            "last_position": num_positions - 1,
        }

    def blobs(self) -> frozenset[str]:
        """Digests of all blobs that the manifest names."""
        shards = (shard.blob for shard in self.shards() if shard.blob is not None)
        files = (file.blob for file in self.tokenizer.files) if self.tokenizer else ()
        return frozenset((*(executable.blob for executable in self.executables), *shards, *files))

    def to_json(self) -> bytes:
        """Canonical JSON: equal manifests give equal bytes."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        if not document["serving"]:
            del document["serving"]
        return canonical_json(document)


def parse_manifest(data: bytes, *, digest: str = "") -> Manifest:
    """Reads a manifest strictly.

    Raises:
        AbiUnsupported: ABI version, flags or submodels that this code does not serve.
        ManifestInvalid: Anything else that does not follow the schema.
    """
    try:
        version = msgspec.json.decode(data, type=_AbiVersion).abi_version
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(str(error), digest) from error
    if version != ABI_VERSION:
        raise AbiUnsupported("abi_version", str(version), str(ABI_VERSION))
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(str(error), digest) from error
    try:
        manifest.to_json()
    except ValueError as error:
        # Large integers, say: what cannot be written again cannot be handed on.
        raise ManifestInvalid(str(error), digest) from error
    _check_is_served(manifest)
    return manifest


def _check_is_served(manifest: Manifest) -> None:
    flags = list_flags()
    served = [name for name, submodel in SUBMODELS.items() if submodel.is_served]
    for executable in manifest.executables:
        path = f"executables[{executable.tag}]"
        unknown = sorted(set(executable.flags) - flags)
        if unknown:
            raise AbiUnsupported(f"{path}.flags", ", ".join(unknown), ", ".join(sorted(flags)))
        if executable.submodel not in served:
            raise AbiUnsupported(f"{path}.submodel", executable.submodel, ", ".join(served))


class _AbiVersion(msgspec.Struct):
    """The one field that every manifest of every ABI version has."""

    abi_version: int
