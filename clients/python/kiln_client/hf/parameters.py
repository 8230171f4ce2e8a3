"""The parameters of transformers' `generate`: what a request to the runtime says of them, and what none can say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypedDict

from kiln.runtime.v1.runtime_pb2 import Capabilities
from transformers import GenerationConfig

from kiln_client.errors import FieldViolation


class OwnOptions(TypedDict, total=False):
    """Options of ours that `generate` takes beside those of transformers; `GenerateOptions` explains them."""

    seed: int
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    forced_token_ids: Sequence[int]
    adapter: str
    cache_salt: str
    timeout_s: float


#: Parameters of requests and runtimes that have transformers' names, each with the value that changes nothing there:
#: those that transformers reads when it samples, and those that it always reads.
_SAMPLED: Final = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
_ALWAYS: Final = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}

_NONE: Final = "None"
_CHOICE: Final = "None: the server picks the tokens, by what the generation config and logit_bias say"
_DRAFT: Final = "None: a deployment speculates if its bundle was compiled so"
_ONE_SEARCH: Final = "1: each sequence draws its own tokens, and num_return_sequences takes several"

#: What no request can say, by the name of the argument or of the generation config's value: what changes nothing beside
#: None and an empty list, and what is accepted in its place.
UNSERVED: Final[Mapping[str, tuple[object, str]]] = MappingProxyType(
    {
        "logits_processor": (None, _CHOICE),
        "prefix_allowed_tokens_fn": (None, f"{_CHOICE}; allowed_token_ids holds for all of them"),
        "assistant_model": (None, _DRAFT),
        "assistant_tokenizer": (None, _DRAFT),
        "prompt_lookup_num_tokens": (None, _DRAFT),
        "assistant_early_exit": (None, _DRAFT),
        "use_mtp": (False, _DRAFT),
        "num_beams": (1, _ONE_SEARCH),
        "num_beam_groups": (1, _ONE_SEARCH),
        "diversity_penalty": (0, _ONE_SEARCH),
        "constraints": (None, _ONE_SEARCH),
        "force_words_ids": (None, _ONE_SEARCH),
        "penalty_alpha": (0, "0: top_k and top_p choose among likely tokens"),
        "dola_layers": (None, _NONE),
        "epsilon_cutoff": (0, "0: min_p drops unlikely tokens"),
        "eta_cutoff": (0, "0: typical_p and min_p drop unlikely tokens"),
        "top_h": (None, "None: top_p and typical_p keep likely tokens"),
        "guidance_scale": (1, "1"),
        "negative_prompt_ids": (None, _NONE),
        "negative_prompt_attention_mask": (None, _NONE),
        "begin_suppress_tokens": (None, "None: suppress_tokens holds for all tokens, forced_token_ids for the first"),
        "forced_eos_token_id": (None, "None: max_new_tokens ends a sequence"),
        "exponential_decay_length_penalty": (None, _NONE),
        "encoder_repetition_penalty": (1, "1: repetition_penalty counts the prompt, too"),
        "encoder_no_repeat_ngram_size": (0, "0: no_repeat_ngram_size counts the prompt, too"),
        "remove_invalid_values": (False, "False: a sequence with an invalid number ends with NUMERICS_INVALID"),
        "watermarking_config": (None, _NONE),
        "token_healing": (False, "False"),
        "output_attentions": (False, "False"),
        "output_hidden_states": (False, "False"),
        "inputs_embeds": (None, "None: prompts are input_ids"),
        "past_key_values": (None, "None: the server keeps keys and values"),
        "cache": (None, "None: the server keeps keys and values"),
        "custom_generate": (None, _NONE),
        "synced_gpus": (False, "False"),
    }
)


def find_unserved(*said: Mapping[str, Any]) -> Iterator[FieldViolation]:
    """Yields what a call asks for that no request can say; of several places that say a value, the first counts."""
    for name, (neutral, accepted) in UNSERVED.items():
        value = next((place[name] for place in said if place.get(name) is not None), None)
        is_empty = isinstance(value, Sequence | Mapping) and not value
        if value is None or is_empty or (isinstance(value, bool | int | float) and value == neutral):
            continue
        shown = value if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
        yield FieldViolation(name, f"got {shown}; accepted: {accepted}", "FEATURE_NOT_SERVED")
    biases: Any = next((place["sequence_bias"] for place in said if place.get("sequence_bias") is not None), {})
    for words, _ in _list_biases(biases):
        if len(words) != 1:
            shown = f"a bias for {len(words)} tokens in a row"
            accepted = "biases for single tokens"
            yield FieldViolation("sequence_bias", f"got {shown}; accepted: {accepted}", "FEATURE_NOT_SERVED")


def choose_options(config: Any, prompt_length: int, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Makes a request's options of a generation config that `generate` has prepared.

    Args:
        config: transformers' `GenerationConfig`, whose `max_length` and `min_length` count from the prompt's beginning.
        prompt_length: Tokens of the prompt, padding included.
        eos_token_ids: The tokens that end a sequence, in place of the bundle's.
    """
    names = _ALWAYS | (_SAMPLED if config.do_sample else {})
    options = {name: neutral if (value := getattr(config, name)) is None else value for name, neutral in names.items()}
    if not config.do_sample:
        options["temperature"] = 0.0
    most = config.max_length - prompt_length
    options |= {
        "max_new_tokens": most,
        "stop_token_ids": eos_token_ids,
        "ignore_eos": True,
        # transformers warns if there can be no sequence of that length, and makes the longest one.
        "min_new_tokens": min(most, max(0, (config.min_length or 0) - prompt_length)),
        # As in transformers, a bad word that is an end of the sequence is ignored.
        "bad_words": [
            *(word for word in config.bad_words_ids or () if [*word] not in [[end] for end in eos_token_ids]),
            *([token] for token in config.suppress_tokens or ()),
        ],
        "logit_bias": {words[0]: bias for words, bias in _list_biases(config.sequence_bias)},
    }
    # transformers forces it at length 1, where an encoder-decoder begins.
    if config.forced_bos_token_id is not None and prompt_length == 1:
        options["forced_token_ids"] = [config.forced_bos_token_id]
    return options


def read_defaults(capabilities: Capabilities) -> GenerationConfig:
    """The generation config that asks for what a deployment does by default."""
    told = capabilities.default_parameters
    # Older runtimes say three of them.
    values = told if told.HasField("temperature") else capabilities.default_sampling
    found = {field.name: value for field, value in values.ListFields()}
    names = ("min_new_tokens", *_ALWAYS, *(_SAMPLED if values.temperature else ()))
    return GenerationConfig(
        eos_token_id=[*capabilities.eos_token_ids],
        do_sample=values.temperature > 0,
        bad_words_ids=[[*word.ids] for word in told.bad_words] or None,
        **{name: found[name] for name in names if name in found},
    )


def _list_biases(biases: Any) -> list[tuple[Sequence[int], float]]:
    """The pairs of token ids and bias of `sequence_bias`, which is a mapping, or a list in files."""
    pairs = biases.items() if isinstance(biases, Mapping) else biases or ()
    return [(words, bias) for words, bias in pairs]
