"""A toy language model with a KV cache, and bundles of it: small enough to compile in a test, real in every part.

Among several ranks, values, the projection that follows them and the vocabulary are divided; queries and keys are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import execution.collectives.operators  # noqa: F401 - registers the operators
from bundle.abi.inputs import INPUTS, PROCESSORS
from bundle.abi.state import AXES, StateLayout, StateTensor
from bundle.abi.submodels import SubmodelName
from bundle.digest import sha256_file
from bundle.manifest import (
    ADAPTER_WEIGHTS,
    ConstantBinding,
    Executable,
    Manifest,
    Sampling,
    WeightSet,
    WeightShard,
    WeightTensor,
)
from compiler_svc.lower.job import LoweredExecutable, LoweringJob, LoweringOptions
from compiler_svc.lower.program import stage_job
from execution.dtypes import TORCH_DTYPES
from execution.logit_changes import change_logits
from execution.sampling import sample
from tests.bundles.manifests import DYNAMIC, make_executable, make_manifest, state_names
from tests.lowering_cache import HOST

VOCAB, HIDDEN, LAYERS, SLOTS, LENGTH, PROMPT = 48, 16, 2, 3, 16, 8
STATE_SHAPE = (SLOTS + 1, 1, LENGTH, HIDDEN)
NUM_STATE = 2 * LAYERS
GLOBAL_TOPK = 12

#: `processed` executables pick tokens, and come with others that change logits first.
Picks = Literal["logits", "tokens", "processed"]
ON_DEVICE = msgspec.structs.replace(DYNAMIC, global_topk=GLOBAL_TOPK, temperature=1.0)
SAMPLING: Mapping[Picks, Sampling] = {
    "logits": msgspec.structs.replace(ON_DEVICE, mode="host"),
    "tokens": ON_DEVICE,
    "processed": ON_DEVICE,
}


_PROCESSED = (PROCESSORS, "cuts")
_CHANGES = tuple(one.name for one in INPUTS.values() if one.flag in _PROCESSED)


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
        rest = rest[input_ids.shape[1] > 1 :]
        params, chance, changes = rest[0], rest[1], dict(zip(_CHANGES, rest[2:], strict=False))
        changed = change_logits(logits, changes, VOCAB, None) if changes else logits
        return (sample(changed, params, chance, GLOBAL_TOPK, changes.get("cuts")), logits, *state)


def make_model(seed: int, picks: Picks = "logits", tp_degree: int = 1) -> ToyModel:
    torch.manual_seed(seed)
    return ToyModel(picks, tp_degree).eval().requires_grad_(False)


def greedy(
    prompt: list[int],
    count: int,
    *,
    seed: int = 0,
    process: Callable[[list[int], Tensor], Tensor] = lambda _, logits: logits,
) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities by the eager module, every position computed anew.

    `process` changes the logits [V] by which a token is picked; it sees the tokens before it.
    """
    model, tokens, logprobs = make_model(seed), list(prompt), []
    for _ in range(count):
        state = [torch.zeros(STATE_SHAPE) for _ in range(NUM_STATE)]
        inputs = ([tokens], [list(range(len(tokens)))], [0], [len(tokens)])
        logits = model(*(torch.tensor(one, dtype=torch.int32) for one in inputs), *state)[0][0]
        token = int(process(tokens, logits).argmax())
        tokens.append(token)
        logprobs.append(float(logits.log_softmax(-1)[token]))
    return tokens[len(prompt) :], logprobs


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
    """Shapes of the k and the v cache of each layer of a rank."""
    return [STATE_SHAPE, (*STATE_SHAPE[:-1], HIDDEN // tp_degree)] * LAYERS


def save_shard(model: ToyModel, rank: int, tp_degree: int, path: Path) -> Path:
    save_file(shard(model, rank, tp_degree), path)
    return path


#: Flags of executables that pick tokens; they return logits too.
FLAGS: Mapping[Picks, tuple[str, ...]] = {
    "logits": ("logits",),
    "tokens": ("logits", "noise_keys", "sampling_params", "tokens"),
    "processed": ("logits", "noise_keys", "sampling_params", "tokens"),
}


def describe(submodel: SubmodelName, picks: Picks, *more: str) -> Executable:
    """An executable that is not built."""
    bucket, rows = (PROMPT, 1) if submodel == "context_encoding" else (LENGTH, 2)
    flags = (*FLAGS[picks], *more)
    return make_executable(submodel, bucket, rows, flags=flags, vocab_size=VOCAB, num_layers=LAYERS)


def describe_all(picks: Picks) -> list[Executable]:
    kinds = ((), _PROCESSED) if picks == "processed" else ((),)
    return [describe(submodel, picks, *more) for more in kinds for submodel in ("context_encoding", "token_generation")]


def describe_toy(executables: Sequence[Executable], picks: Picks, tp_degree: int = 1, **changes: Any) -> Manifest:
    """The manifest of executables that may or may not be built."""
    tensors = tuple(
        StateTensor(name=name, dtype="float32", shape=shape, axes=AXES)
        for name, shape in zip(state_names(LAYERS), state_shapes(tp_degree), strict=True)
    )
    return make_manifest(
        executables=executables,
        tp_degree=tp_degree,
        state=StateLayout(tensors=tensors, num_slots=SLOTS, kv_heads_by_rank=((0,),) * tp_degree),
        sampling=SAMPLING[picks],
        vocab_size=VOCAB,
        eos=1,
        **changes,
    )


def export(submodel: Executable, picks: Picks, tp_degree: int = 1) -> torch.export.ExportedProgram:
    inputs = [torch.ones(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in submodel.inputs]
    state = [torch.zeros(shape) for shape in state_shapes(tp_degree)]
    with torch.no_grad():
        return torch.export.export(make_model(0, picks, tp_degree), (*inputs, *state))


def stage_toy(
    directory: Path, cache_dir: Path, picks: Picks, level: Literal[0, 1, 2], tp_degree: int = 1
) -> list[LoweringJob]:
    jobs = []
    for submodel in describe_all(picks):
        job = stage_job(
            export(submodel, picks, tp_degree),
            tag=submodel.tag,
            num_state=NUM_STATE,
            options=LoweringOptions(optimization_level=level, target=HOST),
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
    by_tag = {executable.tag: executable for executable in describe_all(picks)}
    built = [
        msgspec.structs.replace(
            by_tag[one.tag],
            format=one.format,
            state_convention=one.state_convention,
            blob=digests[one.path],
            constants=tuple(ConstantBinding(name=name, weight_set="model", tensor=name) for name in one.constants),
        )
        for one in executables
    ]
    weight_sets = (WeightSet(name="model", shards=weight_shards),)
    manifest = describe_toy(built, picks, tp_degree, weight_sets=weight_sets)
    return ToyBundle(manifest, blobs, {seed: of[0] for seed, of in shards.items()}, shards)


#: What a writable toy has in its mutable set: an entry is the row of one token.
WRITABLE = ("embedding.weight", "head.bias")


def make_writable(manifest: Manifest, names: Sequence[str] = WRITABLE) -> Manifest:
    """The bundle with some of its weights in the mutable set `ADAPTER_WEIGHTS`, where they begin with zeros."""
    (model,) = manifest.weight_sets
    kept, moved = (
        [
            msgspec.structs.replace(one, tensors=tuple(x for x in one.tensors if (x.name in names) is is_moved))
            for one in model.shards
        ]
        for is_moved in (False, True)
    )
    made = tuple(msgspec.structs.replace(one, blob=None, size_bytes=0) for one in moved)
    executables = []
    for executable in manifest.executables:
        constants = tuple(
            msgspec.structs.replace(one, weight_set=ADAPTER_WEIGHTS) if one.tensor in names else one
            for one in executable.constants
        )
        executables.append(msgspec.structs.replace(executable, constants=constants))
    weight_sets = (
        msgspec.structs.replace(model, shards=tuple(kept)),
        WeightSet(name=ADAPTER_WEIGHTS, shards=made, is_mutable=True),
    )
    return msgspec.structs.replace(manifest, executables=tuple(executables), weight_sets=weight_sets)


def save_entry(seed: int, token: int, path: Path, names: Sequence[str] = WRITABLE) -> Path:
    """Saves what the weights of a seed have for one token, as an entry of a writable toy."""
    weights = make_model(seed).state_dict()
    save_file({name: weights[name][token].clone() for name in names}, path)
    return path
