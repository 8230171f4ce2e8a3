"""A toy language model with a KV cache, and bundles of it: small enough to compile in a test, real in every part.

Among several ranks, values, the projection that follows them and the vocabulary are divided; queries and keys are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import execution.collectives.operators  # noqa: F401 - registers the operators
from bundle.abi import state_names
from bundle.digest import sha256_file
from bundle.manifest import (
    ABI_VERSION,
    KNOWN_FLAGS,
    ConstantBinding,
    Executable,
    Limits,
    Manifest,
    Sampling,
    StateLayout,
    StateTensor,
    Submodel,
    Target,
    TensorSpec,
    Tokens,
    WeightSet,
    WeightShard,
    WeightTensor,
)
from compiler_svc.lower.job import LoweredExecutable, LoweringJob, LoweringOptions
from compiler_svc.lower.program import stage_job
from execution.sampling import sample

VOCAB, HIDDEN, LAYERS, SLOTS, LENGTH, PROMPT = 48, 16, 2, 3, 16, 8
STATE_SHAPE = (SLOTS + 1, 1, LENGTH, HIDDEN)
NUM_STATE = 2 * LAYERS
GLOBAL_TOPK = 12

Picks = Literal["logits", "tokens"]


def all_reduce(x: Tensor, tp_degree: int) -> Tensor:
    return x if tp_degree == 1 else torch.ops.kiln.all_reduce(x, tp_degree)


def all_gather(x: Tensor, tp_degree: int) -> Tensor:
    return x if tp_degree == 1 else torch.ops.kiln.all_gather(x, tp_degree)


class ToyLayer(nn.Module):
    def __init__(self, tp_degree: int) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.v = nn.Linear(HIDDEN, HIDDEN // tp_degree, bias=False)
        self.o = nn.Linear(HIDDEN // tp_degree, HIDDEN, bias=False)
        self._tp_degree = tp_degree

    def forward(
        self, x: Tensor, slots: Tensor, writes: Tensor, positions: Tensor, caches: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [C, T, H]; slots [C]; writes and positions [C, T]; k and v cache as `state_shapes`."""
        where = (writes, torch.zeros_like(writes), positions)
        k_cache = caches[0].index_put(where, self.k(x))
        v_cache = caches[1].index_put(where, self.v(x))
        keys, values = k_cache[slots, 0], v_cache[slots, 0]
        mask = torch.arange(LENGTH)[None, None, :] <= positions[:, :, None]
        scores = (self.q(x) @ keys.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return x + functional.silu(all_reduce(self.o(scores.softmax(-1) @ values), self._tp_degree)), k_cache, v_cache


class ToyModel(nn.Module):
    """Both submodels; `picks` tokens on the device or leaves logits to the host."""

    def __init__(self, picks: Picks, tp_degree: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(ToyLayer(tp_degree) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB // tp_degree)
        if tp_degree > 1:
            self.register_buffer("rank", torch.zeros(1, dtype=torch.int32))
            self.register_buffer("zeros", torch.zeros(tp_degree))
        self._picks = picks
        self._tp_degree = tp_degree

    def forward(self, input_ids: Tensor, position_ids: Tensor, seq_ids: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """The calling convention of `bundle.abi`; a prompt has as many tokens as `num_tokens` says."""
        rest, state = rest[:-NUM_STATE], list(rest[-NUM_STATE:])
        num_tokens = rest[0] if input_ids.shape[1] > 1 else torch.ones_like(seq_ids)
        slots, positions = seq_ids.long(), position_ids.long()
        is_valid = torch.arange(input_ids.shape[1])[None, :] < num_tokens[:, None]
        writes = torch.where(is_valid, slots[:, None], SLOTS)
        x = self.embedding(input_ids)
        if self._tp_degree > 1:
            # A rank that is none of the group's is an index out of range, so one rank's step can be made to fail.
            x = x + self.zeros[self.rank]
        for index, layer in enumerate(self.layers):
            caches = slice(2 * index, 2 * index + 2)
            x, *state[caches] = layer(x, slots, writes, positions, state[caches])
        last = x.gather(1, (num_tokens.long() - 1)[:, None, None].expand(-1, 1, HIDDEN))[:, 0]
        logits = all_gather(self.head(last), self._tp_degree)
        if self._picks == "logits":
            return (logits, *state)
        return (sample(logits, rest[-2], rest[-1], GLOBAL_TOPK), logits, *state)


def make_model(seed: int, picks: Picks = "logits", tp_degree: int = 1) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(picks, tp_degree).eval().requires_grad_(False)


def shard(model: ToyModel, rank: int, tp_degree: int) -> dict[str, Tensor]:
    """What a rank holds of a whole model's weights."""
    axes = {"v": 0, "o": 1, "head": 0}
    shards = {
        name: tensor.chunk(tp_degree, axes[layer])[rank].contiguous()
        if (layer := name.split(".")[-2]) in axes
        else tensor
        for name, tensor in model.state_dict().items()
    }
    if tp_degree > 1:
        shards |= {"rank": torch.tensor([rank], dtype=torch.int32), "zeros": torch.zeros(tp_degree)}
    return shards


def state_shapes(tp_degree: int) -> list[tuple[int, ...]]:
    """Of the k and the v cache of each layer of a rank."""
    return [STATE_SHAPE, (*STATE_SHAPE[:-1], HIDDEN // tp_degree)] * LAYERS


def save_shard(model: ToyModel, rank: int, tp_degree: int, path: Path) -> Path:
    save_file(shard(model, rank, tp_degree), path)
    return path


@dataclass(frozen=True)
class ToySubmodel:
    tag: str
    submodel: Submodel
    batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def describe(submodel: Submodel, picks: Picks) -> ToySubmodel:
    rows, columns = (1, PROMPT) if submodel == "context_encoding" else (2, 1)

    def int32(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=name, dtype="int32", shape=shape)

    def float32(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=name, dtype="float32", shape=shape)

    inputs = [int32("input_ids", rows, columns), int32("position_ids", rows, columns), int32("seq_ids", rows)]
    if submodel == "context_encoding":
        inputs.append(int32("num_tokens", rows))
    outputs = [float32("logits", rows, VOCAB)]
    if picks == "tokens":
        inputs += [float32("sampling_params", rows, 3), float32("rand", rows, 1)]
        outputs.insert(0, int32("tokens", rows))
    bucket = PROMPT if submodel == "context_encoding" else LENGTH
    return ToySubmodel(f"{submodel}_{bucket}", submodel, rows, tuple(inputs), tuple(outputs))


def export(submodel: ToySubmodel, picks: Picks, tp_degree: int = 1) -> torch.export.ExportedProgram:
    dtypes = {"int32": torch.int32, "float32": torch.float32}
    inputs = [torch.ones(spec.shape, dtype=dtypes[spec.dtype]) for spec in submodel.inputs]
    state = [torch.zeros(shape) for shape in state_shapes(tp_degree)]
    with torch.no_grad():
        return torch.export.export(make_model(0, picks, tp_degree), (*inputs, *state))


def stage_toy(
    directory: Path, cache_dir: Path, picks: Picks, level: Literal[0, 1, 2], tp_degree: int = 1
) -> list[LoweringJob]:
    jobs = []
    for name in ("context_encoding", "token_generation"):
        submodel = describe(name, picks)  # type: ignore[arg-type]
        job = stage_job(
            export(submodel, picks, tp_degree),
            tag=submodel.tag,
            num_state=NUM_STATE,
            options=LoweringOptions(optimization_level=level, target=Target(kind="cpu", isa="x86-64-v3")),
            directory=directory / submodel.tag,
            cache_dir=cache_dir,
        )
        jobs.append(job)
    return jobs


@dataclass(frozen=True)
class ToyBundle:
    manifest: Manifest
    blobs: dict[str, Path]
    #: Weight files of rank 0 by the seed that `make_model` takes.
    weights: dict[int, Path]
    #: Weight files by seed and rank.
    shards: dict[int, dict[int, Path]]

    @property
    def blob_path(self) -> Callable[[str], Path]:
        return self.blobs.__getitem__


def make_bundle(
    executables: Sequence[LoweredExecutable], picks: Picks, directory: Path, tp_degree: int = 1
) -> ToyBundle:
    directory.mkdir(parents=True, exist_ok=True)
    shards = {
        seed: {
            rank: save_shard(make_model(seed, picks), rank, tp_degree, directory / f"weights-{seed}-{rank}.safetensors")
            for rank in range(tp_degree)
        }
        for seed in (0, 1)
    }
    weights = [path for by_rank in shards.values() for path in by_rank.values()]
    paths = [*(executable.path for executable in executables), *weights]
    blobs = {sha256_file(path): path for path in paths}
    digests = {path: digest for digest, path in blobs.items()}
    tensors = tuple(
        WeightTensor(name=name, dtype="int32" if name == "rank" else "float32", shape=tuple(tensor.shape))
        for name, tensor in shard(make_model(0, picks), 0, tp_degree).items()
    )
    weight_shards = tuple(
        WeightShard(rank=rank, blob=digests[path], size_bytes=path.stat().st_size, tensors=tensors)
        for rank, path in shards[0].items()
    )
    manifest = Manifest(
        abi_version=ABI_VERSION,
        architecture="Toy",
        config={},
        checkpoint_digest="sha256:" + "0" * 64,
        target=Target(kind="cpu", isa="x86-64-v3"),
        optimization_level=0,
        toolchain={},
        tp_degree=tp_degree,
        executables=tuple(_executable(lowered, digests, picks) for lowered in executables),
        weight_sets=(WeightSet(name="model", shards=weight_shards),),
        state=StateLayout(
            tensors=tuple(
                StateTensor(name=name, dtype="float32", shape=shape, axes=("slot", "kv_head", "position", "head_dim"))
                for name, shape in zip(state_names(LAYERS), state_shapes(tp_degree), strict=True)
            ),
            num_slots=SLOTS,
            kv_heads_by_rank=((0,),) * tp_degree,
        ),
        sampling=Sampling(
            mode="host" if picks == "logits" else "on_device",
            semantics="hf",
            dynamic=True,
            deterministic=False,
            global_topk=GLOBAL_TOPK,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        ),
        limits=Limits(
            max_context_length=PROMPT, max_length=LENGTH, max_new_tokens=None, ctx_batch_size=1, tkg_batch_size=2
        ),
        tokens=Tokens(vocab_size=VOCAB, bos=None, eos=(1,), pad=0),
        tokenizer=None,
        graph_abi_digest="sha256:" + "0" * 64,
    )
    return ToyBundle(manifest, blobs, {seed: of[0] for seed, of in shards.items()}, shards)


def _executable(lowered: LoweredExecutable, digests: dict[Path, str], picks: Picks) -> Executable:
    name: Submodel = "context_encoding" if lowered.tag.startswith("context") else "token_generation"
    submodel = describe(name, picks)
    return Executable(
        tag=lowered.tag,
        submodel=name,
        bucket=(PROMPT if name == "context_encoding" else LENGTH,),
        batch_size=submodel.batch_size,
        format=lowered.format,
        state_convention=lowered.state_convention,
        blob=digests[lowered.path],
        inputs=submodel.inputs,
        outputs=submodel.outputs,
        state=state_names(LAYERS),
        constants=tuple(
            ConstantBinding(name=constant, weight_set="model", tensor=constant) for constant in lowered.constants
        ),
        graph_digest="sha256:" + "0" * 64,
        flags=tuple(sorted({tensor.name for tensor in (*submodel.inputs, *submodel.outputs)} & KNOWN_FLAGS)),
    )
