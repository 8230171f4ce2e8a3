"""What a run measures: rows of workloads, each a model in a dtype and format, with its batches, prompts and rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.formats import FORMATS, PLAIN, Format


@dataclass(frozen=True, slots=True)
class Crowd:
    """A long prompt that arrives while streams decode.

    Attributes:
        prompt: Tokens of the prompt.
        chunk: Tokens of it that a step computes between two tokens of the streams.
        steps: Tokens of each stream before the prompt arrives, whose pace its pace meanwhile is compared with.
    """

    streams: int
    prompt: int
    chunk: int
    steps: int = 32


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts that begin alike.

    Attributes:
        shared: Tokens that are the same in all of them.
        own: Tokens behind these.
        block: Tokens of a block of the KV cache.
        prompts: How many are sent in a round, one after the other.
    """

    shared: int
    own: int
    block: int
    prompts: int = 5


@dataclass(frozen=True, slots=True)
class Switch:
    """An option of the runtime whose states, given as command lines, are compared, each in a runtime of its own."""

    title: str
    on: tuple[str, ...]
    off: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model in one dtype and format, and what is measured of it.

    Attributes:
        model: Changes to the configuration of the random Llama.
        dtype: Of the checkpoint, activations, keys and values, of all engines, and of weights unless the format says
            another.
        format: How all engines keep the model: a name of `FORMATS`.
        variants: Other formats in which Kiln is measured beside it, as bare executables.
        batches: Streams that are decoded at once, each with a bundle of its own.
        prompts: Tokens of the prompts whose prefill is measured.
        context: Tokens before those whose decoding is measured.
        length: Positions of the KV cache of each stream.
        rounds: How often everything is measured, in turns.
        steps: Decode steps of one stream in one measurement; fewer with more streams.
        raced: Those of `batches` that the peers decode, too; without any, no peer runs.
        few_rounds: In how many rounds what takes long is measured: prompts behind the first, batches that no peer
            decodes, and what follows.
        crowd: A prompt among streams, with and without chunks; None leaves it out.
        prefix: Prompts that begin alike, with and without a cache of prefixes; None leaves it out.
        stepwise: Those of `batches` that are decoded without async scheduling, too.
        is_served: Whether streams through gRPC are measured, too, or bare executables alone.
        registered: Adapters that are loaded under names which no stream has, to measure the streams once more.
    """

    name: str
    model: Mapping[str, int]
    dtype: str
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int
    length: int
    rounds: int
    steps: int
    format: str = PLAIN
    variants: tuple[str, ...] = ()
    raced: tuple[int, ...] = ()
    few_rounds: int = 1
    crowd: Crowd | None = None
    prefix: SharedPrefix | None = None
    stepwise: tuple[int, ...] = ()
    is_served: bool = True
    registered: int = 0
    num_threads: int = 2

    @property
    def bare_engines(self) -> dict[str, Format]:
        """The formats whose executables are measured by themselves, by the prefix of their figures' names."""
        return {BARE: FORMATS[self.format], **{name: FORMATS[name] for name in self.variants}}

    @property
    def peers(self) -> Mapping[str, str]:
        """The peers that are measured, and their words for the format."""
        return FORMATS[self.format].peers if self.raced else {}

    @property
    def bundles(self) -> dict[str, dict[str, Any]]:
        """The InferenceConfig of each bundle, by its name."""
        bundles: dict[str, dict[str, Any]] = {}
        for engine in self.bare_engines:
            for batch in self.batches:
                prompts = (self.context if self.is_served else min(self.context, MAX_BARE_PROMPT),)
                bundles[decode_bundle(batch, engine)] = self._configure(batch, self.length, prompts, engine)
            if self.prompts:
                crowd = self.crowd or Crowd(streams=0, prompt=self.prompts[-1], chunk=self.prompts[0])
                buckets = tuple(sorted({*self.prompts, crowd.prompt, crowd.chunk}))
                length = crowd.prompt + CROWD_ROOM
                bundles[prefill_bundle(engine)] = self._configure(crowd.streams + 1, length, buckets, engine)
        if self.prefix is not None:
            bundles[PREFIXES] = self._configure_prefixes(self.prefix)
        return bundles

    @property
    def switches(self) -> dict[str, Switch]:
        """The options of the runtime that are compared, by their names."""
        switches: dict[str, Switch] = {}
        if self.crowd is not None:
            chunked, whole = (f"--max-chunk-tokens={tokens}" for tokens in (self.crowd.chunk, self.crowd.prompt))
            switches[CHUNKS] = Switch("chunked prompts", (chunked,), (whole,))
        if self.stepwise:
            switches[ASYNC] = Switch("async scheduling", ("--async-scheduling",), ("--no-async-scheduling",))
        return switches

    def find_dtype(self, engine: str) -> str:
        """The dtype of an engine's activations."""
        return self.bare_engines.get(engine, FORMATS[PLAIN]).dtype or self.dtype

    def needs_scales(self, bundle: str) -> bool:
        """Whether a bundle is of a checkpoint with scales of keys and values."""
        scaled = [engine for engine, format_ in self.bare_engines.items() if format_.scales_cache]
        return any(bundle.startswith(f"{engine}-") for engine in scaled)

    def count_steps(self, batch: int) -> int:
        """Decode steps of one measurement of so many streams."""
        return max(8, self.steps // batch)

    def count_tokens(self, batch: int) -> int:
        """Tokens of each of so many streams that are served at once.

        Between two steps of tokens at least one prompt starts, so the first stream has no more tokens than there are
        streams when the last one begins.
        """
        return min(2 * self.steps, max(24, batch + 16, 40 * self.steps // batch))

    def count_prefills(self, tokens: int) -> int:
        """Prompts of one measurement: fewer if they are long."""
        return max(1, 5 * self.prompts[0] // tokens)

    def decode_position(self, batch: int) -> int:
        """The position in the middle of those that a measurement decodes."""
        return self.context + self.count_steps(batch) // 2

    def is_measured(self, number: int, *, takes_long: bool) -> bool:
        """Whether the round of this number, from 0, measures something: what takes long is spread over the run."""
        return not takes_long or number * self.few_rounds % self.rounds < self.few_rounds

    def _configure_prefixes(self, prefix: SharedPrefix) -> dict[str, Any]:
        longest = prefix.shared + prefix.own
        length = longest + prefix.block
        config = self._configure(1, length, (prefix.own, longest), BARE)
        config["neuron_config"] |= {
            "is_block_kv_layout": True,
            "is_prefix_caching": True,
            "pa_block_size": prefix.block,
            "pa_num_blocks": 4 * length // prefix.block,
            "prefix_buckets": [prefix.shared],
        }
        return config

    def _configure(self, batch: int, length: int, prompts: tuple[int, ...], engine: str) -> dict[str, Any]:
        return {
            "neuron_config": {
                "seq_len": length,
                "max_context_length": prompts[-1],
                "batch_size": batch,
                "ctx_batch_size": 1,
                "torch_dtype": self.find_dtype(engine),
                "enable_bucketing": True,
                "context_encoding_buckets": list(prompts),
                "token_generation_buckets": [length],
                "is_continuous_batching": True,
                "on_device_sampling_config": {"dynamic": True},
                **self.bare_engines[engine].config,
            }
        }


#: The engine that runs the executables of the workload's own format by themselves.
BARE: Final = "bare"
#: Tokens of the longest prompt of a bundle that only decodes, so that none is compiled for a long context.
MAX_BARE_PROMPT: Final = 32
#: Name of the bundle whose prefill is measured, among streams, too.
PREFILL: Final = "prefill"
#: Name of the bundle that caches prefixes.
PREFIXES: Final = "prefixes"
#: Positions of `PREFILL` behind its longest prompt, for the answer.
CROWD_ROOM: Final = 64
#: The figure of an adapter that replaces another one.
SWAP: Final = "swap"
#: Names of switches.
CHUNKS: Final = "chunks"
ASYNC: Final = "async"


def decode_bundle(batch: int, engine: str = BARE) -> str:
    """Name of the bundle with which an engine decodes so many streams at once."""
    return _name_bundle(engine, f"batch{batch}")


def prefill_bundle(engine: str = BARE) -> str:
    """Name of the bundle with which an engine computes prompts."""
    return _name_bundle(engine, PREFILL)


def _name_bundle(engine: str, what: str) -> str:
    return what if engine == BARE else f"{engine}-{what}"


#: The shape of the published models of 160 M parameters.
_SMALL: Final = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
#: 1.1 B parameters with grouped queries.
_LARGE: Final = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_TINY: Final = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _small(dtype: str) -> Workload:
    return Workload(
        name=f"160m-{dtype}",
        model=_SMALL,
        dtype=dtype,
        batches=(1, 4, 16, 64),
        prompts=(128, 512, 2048),
        context=32,
        length=128,
        rounds=5,
        steps=40,
        raced=(1, 4, 16),
        few_rounds=3,
        crowd=Crowd(streams=8, prompt=2048, chunk=256),
        prefix=SharedPrefix(shared=512, own=64, block=32),
        stepwise=(1, 16),
    )


#: In float32, the weights of all engines together would not fit into 24 GiB beside their caches.
LARGE: Final = Workload(
    name="1b-bfloat16",
    model=_LARGE,
    dtype="bfloat16",
    batches=(1, 4, 16),
    prompts=(128, 512, 2048),
    context=32,
    length=128,
    rounds=3,
    steps=24,
    raced=(1, 4, 16),
    few_rounds=2,
)
#: Its decoding of one stream alone, for the page that everybody reads.
LARGE_DECODE: Final = replace(LARGE, name="1b-bfloat16-decode", batches=(1,), prompts=(), raced=())
#: A run takes about half an hour with all of them.
DEFAULT: Final = (_small("float32"), _small("bfloat16"), LARGE_DECODE)


def _decode_caches(workload: Workload, length: int) -> Workload:
    """Decodes as many streams as a workload does at most, close to a length, with caches of both formats."""
    return replace(
        workload,
        name=f"{workload.name}-caches",
        batches=workload.batches[-1:],
        prompts=(),
        context=length - workload.length + workload.context,
        length=length,
        raced=(),
        variants=("int8-cache",),
    )


def _serve(workload: Workload, format_: str) -> Workload:
    batches = (workload.batches[0], workload.batches[-1])
    name = f"{workload.name}-{format_}-served"
    return replace(workload, name=name, format=format_, batches=batches, prompts=(), raced=(), is_served=True)


def _vary_formats(workload: Workload, *, cache_length: int) -> tuple[Workload, ...]:
    """A bare workload in each format of weights, beside its peers; in each dtype; with each format of caches; and
    through gRPC in int8.
    """
    return (
        replace(workload, name=f"{workload.name}-int8", format="int8"),
        replace(workload, name=f"{workload.name}-int4", format="int4", variants=("int4-by-32",)),
        replace(workload, name=f"{workload.name}-dtypes", raced=(), variants=("bfloat16", "float16")),
        _decode_caches(workload, cache_length),
        replace(
            workload,
            name=f"{workload.name}-adapters",
            format="adapters",
            batches=(workload.batches[0], workload.batches[-1]),
            prompts=workload.prompts[:1],
            raced=(workload.raced[0], workload.raced[-1]),
            variants=(PLAIN, "adapters-idle"),
        ),
        _serve(workload, "int8"),
        replace(_serve(workload, "adapters-idle"), registered=1000),
    )


_FORMATS_BASE: Final = Workload(
    name="160m",
    model=_SMALL,
    dtype="float32",
    batches=(1, 4, 16),
    prompts=(128, 512),
    context=32,
    length=128,
    rounds=5,
    steps=40,
    raced=(1, 4, 16),
    few_rounds=3,
    is_served=False,
)
#: Quantized weights and caches beside full precision, peers, and themselves through gRPC.
FORMAT_WORKLOADS: Final = _vary_formats(_FORMATS_BASE, cache_length=4096)
#: Without what 24 GiB do not hold beside each other: all dtypes, and caches of float32.
LARGE_FORMATS: Final = _vary_formats(
    replace(_FORMATS_BASE, name="1b", model=_LARGE, dtype="bfloat16", rounds=3, steps=24, few_rounds=2),
    cache_length=4096,
)[:2]

_TINY_BASE: Final = Workload(
    name="tiny",
    model=_TINY,
    dtype="float32",
    batches=(1, 4),
    prompts=(32, 64),
    context=16,
    length=64,
    rounds=2,
    steps=16,
    raced=(1, 4),
)
_TINY_MODELS: Final = tuple(
    replace(
        _TINY_BASE,
        name=f"tiny-{dtype}",
        dtype=dtype,
        crowd=Crowd(streams=2, prompt=64, chunk=16, steps=8),
        prefix=SharedPrefix(shared=64, own=16, block=16),
        stepwise=(1, 4),
    )
    for dtype in ("float32", "bfloat16")
)
#: A tiny workload of each shape that `DEFAULT` has.
QUICK: Final = (
    *_TINY_MODELS,
    replace(_TINY_BASE, name="tiny-bfloat16-decode", dtype="bfloat16", batches=(1,), prompts=(), raced=()),
)
#: A tiny workload of each shape that `FORMAT_WORKLOADS` has.
QUICK_FORMATS: Final = _vary_formats(replace(_TINY_BASE, rounds=1, is_served=False), cache_length=128)
#: By name, all that the command line can ask for.
WORKLOADS: Final = {
    workload.name: workload for workload in (*DEFAULT, LARGE, *QUICK, *FORMAT_WORKLOADS, *LARGE_FORMATS, *QUICK_FORMATS)
}
