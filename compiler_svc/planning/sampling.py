"""How tokens are picked for requests that say nothing: by the configuration, or by `generation_config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec.structs import replace

from bundle.manifest import GenerationDefaults, Sampling, TargetKind, Tokens
from compiler_svc.config import NeuronConfig
from compiler_svc.models.attributes import AttributeReader
from execution.sampling_parameters import MAX_TOKENS, PARAMETERS
from targets.registry import TARGETS

_GREEDY: Final = Sampling(
    mode="on_device",
    semantics="hf",
    dynamic=False,
    deterministic=False,
    global_topk=0,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
)

#: Numbers of the file that are defaults of requests where processors are served; transformers reads the latter only if
#: it samples.
_ALWAYS: Final = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
_SAMPLED: Final = ("min_p", "typical_p")
#: Lists of words, and of tokens, that become `bad_words`.
_WORDS, _TOKENS = "bad_words_ids", "suppress_tokens"

#: What the file can ask of transformers that is no default of our requests, each with the value that changes nothing.
_UNSERVED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "exponential_decay_length_penalty": None,
        "forced_eos_token_id": None,
        "begin_suppress_tokens": None,
        "guidance_scale": 1,
        "num_beams": 1,
        "sequence_bias": None,
        "top_h": None,
    }
)
#: The same where no processors are served.
_UNSERVED_UNPROCESSED: Final[Mapping[str, object]] = MappingProxyType(
    {name: PARAMETERS[name].neutral for name in (*_ALWAYS, *_SAMPLED)} | {_WORDS: None, _TOKENS: None}
)


def choose_sampling(config: NeuronConfig) -> Sampling:
    """Describes how tokens are picked: the baked-in parameters, or the defaults for requests that set none.

    Without `do_sample` sampling is greedy, which temperature 0 says. The default `top_k` of 1 says the same again. If
    requests may choose, it is dropped, because a request that sets a temperature wants to sample.
    """
    on_device = config.on_device_sampling_config
    if on_device is None:
        return replace(_GREEDY, mode="host", dynamic=True, chance="noise_keys")
    if on_device.is_greedy:
        return replace(_GREEDY, deterministic=on_device.deterministic)
    return replace(
        _GREEDY,
        dynamic=on_device.dynamic,
        deterministic=on_device.deterministic,
        global_topk=on_device.global_topk,
        temperature=on_device.temperature if on_device.do_sample else 0.0,
        top_k=on_device.top_k if on_device.do_sample or on_device.top_k != 1 else 0,
        top_p=on_device.top_p,
        chance="rand" if on_device.deterministic else "noise_keys",
    )


def serves_processors(config: NeuronConfig, target: TargetKind) -> bool:
    """Whether requests may change logits before tokens are picked, as `Manifest.serves_processors` of the bundle."""
    leaves_logits = config.output_logits or TARGETS[target].returns_internal
    return config.on_device_sampling_config is None or leaves_logits or config.processes_logits


def choose_generation_defaults(
    generation_config: Mapping[str, Any], config: NeuronConfig, tokens: Tokens, target: TargetKind
) -> GenerationDefaults | None:
    """Reads what a checkpoint's `generation_config.json` names for requests that set no sampling values.

    Only what the file names counts: transformers has defaults of its own beside it, such as a `top_k` of 50. Without
    `do_sample` it is greedy there, and so it is here. A configuration with `do_sample` takes precedence, and a `top_k`
    above its `global_topk` is reduced to it, because executables have no more candidates. Penalties and exclusions need
    processors of logits.

    Returns None if the file names nothing, or if requests cannot choose or have the configuration's defaults.
    """
    on_device, sampling = config.on_device_sampling_config, choose_sampling(config)
    if not sampling.dynamic or (on_device is not None and on_device.do_sample):
        return None
    chosen: dict[str, Any] = {}
    with AttributeReader(generation_config, prefix="generation_config.") as reader:
        samples = reader.boolean("do_sample", default=False)
        if samples:
            chosen |= _read_draw(reader, sampling.global_topk)
        if serves_processors(config, target):
            chosen |= _read_numbers(reader, (*_ALWAYS, *_SAMPLED) if samples else _ALWAYS)
            chosen["bad_words"] = _read_words(reader, tokens)
    defaults = GenerationDefaults(**chosen)
    return None if defaults == GenerationDefaults() else defaults


def warn_of_unserved_generation(
    generation_config: Mapping[str, Any], config: NeuronConfig, target: TargetKind
) -> Iterator[str]:
    """Names generation defaults of the checkpoint that requests will not have."""
    unserved = _UNSERVED if serves_processors(config, target) else {**_UNSERVED, **_UNSERVED_UNPROCESSED}
    for name, neutral in unserved.items():
        if (value := generation_config.get(name)) not in (None, [], neutral):
            yield f"generation_config.{name}: {value} is no default of requests here"


def _read_draw(reader: AttributeReader, global_topk: int) -> dict[str, Any]:
    temperature = 0.0 if reader.values.get("temperature") == 0 else reader.number("temperature", default=1.0)
    # Some files say -1 for no limit.
    top_k = None if reader.values.get("top_k") is None else max(0, reader.integer("top_k", minimum=-1))
    top_p = reader.optional_number("top_p", above=0.0)
    if top_p is not None and top_p > 1:
        reader.note_invalid("top_p", top_p, "a number above 0, at most 1")
    if top_k and global_topk:
        top_k = min(top_k, global_topk)
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def _read_numbers(reader: AttributeReader, names: tuple[str, ...]) -> dict[str, Any]:
    """The numbers that the file names, but for those that change nothing."""
    found = {}
    for name in names:
        value, row = reader.values.get(name), PARAMETERS[name]
        if value is None:
            continue
        is_number = isinstance(value, int if isinstance(row.neutral, int) else int | float)
        if isinstance(value, bool) or not is_number or value not in row.domain:
            reader.note_invalid(name, value, str(row.domain))
        elif value != row.neutral:
            found[name] = value
    return found


def _read_words(reader: AttributeReader, tokens: Tokens) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens that are not generated, without those that the model cannot generate."""
    words = reader.values.get(_WORDS) or []
    single = reader.values.get(_TOKENS) or []
    for name, value, is_word in ((_WORDS, words, True), (_TOKENS, single, False)):
        if not isinstance(value, list) or not all(_is_word(one if is_word else [one]) for one in value):
            reader.note_invalid(name, value, "a list of lists of token ids" if is_word else "a list of token ids")
            return ()
    # As in transformers, a word that is an end of the sequence is ignored.
    all_words = [word for word in words if word not in [[end] for end in tokens.eos]] + [[one] for one in single]
    known = tuple(tuple(word) for word in all_words if max(word) < tokens.vocab_size)
    if sum(map(len, known)) > MAX_TOKENS:
        reader.note_not_served(_WORDS if words else _TOKENS, f"{sum(map(len, known))} tokens", f"at most {MAX_TOKENS}")
    return known


def _is_word(word: object) -> bool:
    return (
        isinstance(word, list)
        and bool(word)
        and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in word)
    )
