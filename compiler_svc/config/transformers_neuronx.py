"""Options under the names of Transformers NeuronX, as attributes of NeuronConfig.

The names are those of its developer guide: arguments of `from_pretrained`, and attributes of its NeuronConfig,
GenerationConfig and QuantizationConfig.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bundle.errors import FieldViolation
from compiler_svc.config.buckets import SHORTEST_BUCKET, halve_buckets
from compiler_svc.config.domains import LENGTH, show
from compiler_svc.config.findings import Hint
from compiler_svc.config.tables.transformers_neuronx import CODE_OPTIONS, CODE_SUBOPTIONS, CodeOption

SECTION: Final = "transformers_neuronx"
_NEURON_CONFIG: Final = "neuron_config."
_GUIDE: Final = "Transformers NeuronX developer guide"

DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

SHARD_OVER_HEADS: Final = "shard-over-heads"
REPLICATED_HEADS: Final = "replicated-heads"
_STRATEGIES: Final = (SHARD_OVER_HEADS, "shard-over-batch", REPLICATED_HEADS, "all-gather-heads")

#: Options that are attributes of NeuronConfig under another name, or the same.
_RENAMED: Final = {
    "batch_size": "batch_size",
    "tp_degree": "tp_degree",
    "prompt_batch_size": "ctx_batch_size",
    "fuse_qkv": "fused_qkv",
}
_NAMES: Final = (
    *_RENAMED,
    "n_positions",
    "context_length_estimate",
    "amp",
    "group_query_attention",
    "on_device_generation",
    "quant",
    "kv_cache_quant",
    *(option.name for option in CODE_OPTIONS),
)
_GENERATION: Final = {
    "do_sample": "do_sample",
    "top_k": "top_k",
    "top_p": "top_p",
    "temperature": "temperature",
    "dynamic": "dynamic",
    "global_top_k": "global_topk",
}
_GENERATION_TOP_K: Final = 50
_LENGTHS: Final = f"{LENGTH.accepted}, or a list of them, each larger than the one before"


@dataclass(frozen=True)
class Translation:
    """What a section says, in NeuronConfig's words.

    Attributes:
        values: Attributes of NeuronConfig, as a document would give them.
        paths: Where each of them comes from, by attribute; attributes of attributes behind a dot.
        violations: Mistakes of the section.
        unserved: Options that exist, at values that this version does not serve.
        notes: What the author of the section should know.
        hints: Options that are ignored.
    """

    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    violations: list[FieldViolation] = field(default_factory=list)
    unserved: list[FieldViolation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)

    def locate(self, path: str) -> str:
        """Finds a path of the document, such as `neuron_config.seq_len`, in the section; returns others unchanged."""
        attribute = path.removeprefix(_NEURON_CONFIG)
        for whole in (attribute, attribute.partition(".")[0]):
            if path.startswith(_NEURON_CONFIG) and whole in self.paths:
                return self.paths[whole] + attribute.removeprefix(whole)
        return path

    def put(self, attribute: str, value: object, name: str) -> None:
        """Gives an attribute the value that the option `name` means."""
        self.values[attribute] = value
        self.paths[attribute] = f"{SECTION}.{name}"

    def derive_seq_len(self) -> None:
        """Gives sequences twice the longest prompt if only prompts have lengths, as prompts get half of sequences.

        The library takes the model's positions, which would give models of long contexts an unwanted, large cache.
        """
        prompts = self.values.get("context_encoding_buckets")
        if prompts and "seq_len" not in self.values and 2 * prompts[-1] > SHORTEST_BUCKET:
            seq_len = min(2 * prompts[-1], LENGTH.largest)
            self.put("seq_len", seq_len, "context_length_estimate")
            self.notes.append(
                f"{SECTION}.n_positions: unset, so sequences get {seq_len} tokens, twice the longest of "
                f"context_length_estimate, and not the model's positions"
            )

    def refuse(self, name: str, value: object, accepted: str) -> None:
        """Adds a mistake."""
        self.violations.append(_violation(name, value, accepted))


def translate_transformers_neuronx(section: Mapping[str, Any]) -> Translation:
    """Translates a section; NeuronConfig's attributes say later which values are in range. null is unset.

    One number for `n_positions` turns bucketing on with the powers of two from 128 and the number itself; unless
    `context_length_estimate` says otherwise, prompts get half of each token generation bucket.
    """
    translation = Translation()
    given = _take_known(translation, section, _NAMES, "")
    for name, attribute in _RENAMED.items():
        if name in given:
            translation.put(attribute, given[name], name)
    _translate_lengths(translation, given)
    _translate_amp(translation, given)
    _translate_strategy(translation, given)
    _translate_generation(translation, given)
    _translate_quantization(translation, given)
    _translate_kv_quantization(translation, given)
    for option, value in _take_code_options(translation, given, CODE_OPTIONS):
        translation.put(option.becomes, value, option.name)
    return translation


def validate_head_sharding(
    section: Mapping[str, Any], *, num_key_value_heads: int, tp_degree: int
) -> FieldViolation | None:
    """Checks that a model's KV heads fit the strategy that a section names; None if they do, or if it names none.

    Kiln gives every rank whole KV heads of its own if they can be shared out evenly, and copies if they cannot.
    """
    strategy, can_share = section.get("group_query_attention"), num_key_value_heads % tp_degree == 0
    if strategy == SHARD_OVER_HEADS and not can_share:
        accepted = (
            f"{REPLICATED_HEADS!r}: the model's {num_key_value_heads} KV heads are no multiple of tp_degree, which is "
            f"{tp_degree}"
        )
    elif strategy == REPLICATED_HEADS and can_share and tp_degree > 1:
        accepted = (
            f"{SHARD_OVER_HEADS!r}: the model's {num_key_value_heads} KV heads are a multiple of tp_degree, which is "
            f"{tp_degree}"
        )
    else:
        return None
    return _violation("group_query_attention", strategy, f"{accepted} ({_GUIDE}, Grouped-query attention)")


def _take_known(translation: Translation, given: Any, names: Iterable[str], path: str) -> dict[str, Any]:
    """The options that are set, without the names that are none."""
    if not isinstance(given, Mapping):
        translation.refuse(path.removesuffix("."), given, "an object")
        return {}
    known = tuple(names)
    for name in given.keys() - set(known):
        similar = difflib.get_close_matches(name, known, n=1)
        accepted = f"did you mean {similar[0]!r}?" if similar else f"one of {', '.join(known)}"
        translation.refuse(path + name, given[name], accepted)
    return {name: given[name] for name in known if given.get(name) is not None}


def _translate_lengths(translation: Translation, given: Mapping[str, Any]) -> None:
    positions = _read_lengths(translation, given, "n_positions")
    prompts = _read_lengths(translation, given, "context_length_estimate")
    if positions:
        token_buckets = positions if len(positions) > 1 else _double_up_to(positions[0])
        translation.put("seq_len", positions[-1], "n_positions")
        translation.put("token_generation_buckets", list(token_buckets), "n_positions")
        if "context_length_estimate" not in given:
            translation.put("context_encoding_buckets", list(halve_buckets(token_buckets)), "n_positions")
    if prompts:
        translation.put("context_encoding_buckets", list(prompts), "context_length_estimate")
    if positions or prompts:
        translation.put("enable_bucketing", True, "n_positions" if positions else "context_length_estimate")


def _read_lengths(translation: Translation, given: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The lengths of an option that takes one or a list; none if it is unset or a mistake."""
    value = given.get(name)
    if value is None:
        return ()
    lengths = value if isinstance(value, list) else [value]
    in_range = bool(lengths) and all(map(LENGTH.accepts, lengths))
    if in_range and all(shorter < longer for shorter, longer in itertools.pairwise(lengths)):
        return tuple(lengths)
    translation.refuse(name, value, _LENGTHS)
    return ()


def _double_up_to(longest: int) -> tuple[int, ...]:
    """Powers of two from 128 that are below `longest`, and `longest`; unlike NxD Inference's, none is left out."""
    powers = itertools.takewhile(lambda length: length < longest, (SHORTEST_BUCKET << n for n in itertools.count()))
    return (*powers, longest)


def _translate_amp(translation: Translation, given: Mapping[str, Any]) -> None:
    amp = given.get("amp")
    if amp is None:
        return
    if not isinstance(amp, str) or amp not in DTYPES:
        translation.refuse("amp", amp, _one_of(DTYPES))
        return
    translation.put("torch_dtype", DTYPES[amp], "amp")


def _translate_strategy(translation: Translation, given: Mapping[str, Any]) -> None:
    name, served = "group_query_attention", (SHARD_OVER_HEADS, REPLICATED_HEADS)
    strategy = given.get(name)
    if strategy is None or strategy in served:
        return
    if strategy not in _STRATEGIES:
        translation.refuse(name, strategy, _one_of(_STRATEGIES))
        return
    translation.unserved.append(_violation(name, strategy, f"{_one_of(served)}, all that this version serves"))


def _translate_generation(translation: Translation, given: Mapping[str, Any]) -> None:
    if "on_device_generation" not in given:
        return
    path = "on_device_generation."
    options = _take_suboptions(translation, given, path, (*_GENERATION, "max_length"))
    sampling = {attribute: options[name] for name, attribute in _GENERATION.items() if name in options}
    paths = {attribute: name for name, attribute in _GENERATION.items()}
    for option, value in _take_code_options(translation, options, CODE_SUBOPTIONS["on_device_generation"], path):
        sampling[option.becomes] = value
        paths[option.becomes] = option.name
    # Greedy sampling has no use for candidates, and a remark on a default would only confuse.
    if sampling.get("do_sample") or sampling.get("dynamic"):
        sampling.setdefault("top_k", _GENERATION_TOP_K)
    translation.put("on_device_sampling_config", sampling, path.removesuffix("."))
    for attribute, name in paths.items():
        translation.paths[f"on_device_sampling_config.{attribute}"] = f"{SECTION}.{path}{name}"
    max_length = options.get("max_length")
    if max_length is None:
        return
    seq_len = translation.values.get("seq_len", max_length)
    if max_length != seq_len:
        translation.refuse(f"{path}max_length", max_length, f"the longest of n_positions, which is {seq_len}")
    elif "seq_len" not in translation.values:
        translation.put("seq_len", max_length, f"{path}max_length")


def _translate_quantization(translation: Translation, given: Mapping[str, Any]) -> None:
    if "quant" not in given:
        return
    path = "quant."
    options = _take_suboptions(translation, given, path, ("quant_dtype", "dequant_dtype"))
    if options.get("quant_dtype") != "s8":
        translation.refuse("quant.quant_dtype", options.get("quant_dtype"), f"'s8' ({_GUIDE}, int8 weight storage)")
    translation.put("quantized", True, "quant")
    translation.put("quantization_dtype", "int8", "quant.quant_dtype")
    for option, value in _take_code_options(translation, options, CODE_SUBOPTIONS["quant"], path):
        translation.put(option.becomes, value, path + option.name)
    if (dequant := options.get("dequant_dtype")) is not None:
        _translate_dequantized_dtype(translation, dequant, f"{path}dequant_dtype")


def _translate_kv_quantization(translation: Translation, given: Mapping[str, Any]) -> None:
    if "kv_cache_quant" not in given:
        return
    path = "kv_cache_quant."
    options = {"quant_dtype": "s8"} | _take_suboptions(translation, given, path, ())
    translation.put("kv_cache_quant", True, "kv_cache_quant")
    for option, value in _take_code_options(translation, options, CODE_SUBOPTIONS["kv_cache_quant"], path):
        _translate_dequantized_dtype(translation, value, path + option.name)


def _translate_dequantized_dtype(translation: Translation, word: object, name: str) -> None:
    """The dtype of computation, which all options that say one have in common."""
    if not isinstance(word, str) or word not in DTYPES:
        translation.refuse(name, word, _one_of(DTYPES))
        return
    dtype = translation.values.get("torch_dtype")
    if dtype is None:
        translation.put("torch_dtype", DTYPES[word], name)
    elif dtype != DTYPES[word]:
        other = translation.paths["torch_dtype"].removeprefix(f"{SECTION}.")
        said = next(one for one, meant in DTYPES.items() if meant == dtype)
        translation.refuse(name, word, f"{other}, which is {show(said)} ({_GUIDE}, int8 weight storage)")


def _take_suboptions(
    translation: Translation, given: Mapping[str, Any], path: str, names: tuple[str, ...]
) -> dict[str, Any]:
    """The options that are set in an option that is an object: those of the guide, by name, and those of the code."""
    option = path.removesuffix(".")
    known = (*names, *(one.name for one in CODE_SUBOPTIONS[option]))
    return _take_known(translation, given[option], known, path)


def _take_code_options(
    translation: Translation, given: Mapping[str, Any], options: Iterable[CodeOption], path: str = ""
) -> Iterator[tuple[CodeOption, Any]]:
    """Yields the options that become attributes, with the attributes' values; notes what becomes of the others."""
    for option in options:
        name, value = path + option.name, given.get(option.name)
        if value is None:
            continue
        if not option.domain.accepts(value):
            translation.refuse(name, value, option.domain.accepted)
        elif option.becomes and option.means is None:
            yield option, value
        elif option.means is not None:
            if value in option.means:
                yield option, option.means[value]
        elif option.hint:
            translation.hints.append(Hint(f"{SECTION}.{name}", value, option.hint))
        elif value != option.only:
            only = "unset" if option.only is None else show(option.only)
            translation.unserved.append(_violation(name, value, f"{only}: {option.refused}"))


def _one_of(words: Iterable[str]) -> str:
    return ", ".join(map(repr, words))


def _violation(name: str, value: object, accepted: str) -> FieldViolation:
    return FieldViolation(f"{SECTION}.{name}" if name else SECTION, show(value), accepted)
