"""What `generate` of transformers asks the runtime for, and what it makes of answers and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import torch
from kiln.runtime.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    Accepted,
    Finished,
    GenerateResponse,
    Token,
    TokenDelta,
)
from kiln.runtime.v1.runtime_pb2 import Capabilities, DefaultSampling, Deployment, GetDeploymentResponse
from kiln_client.errors import DeadlineExceeded, FeatureNotServed, StreamIncomplete
from kiln_client.hf import KilnForCausalLM
from kiln_client.hf.neuron import HuggingFaceGenerationAdapter, HuggingFaceGenerationModelAdapter, KilnForSampling
from kiln_client.hf.parameters import UNSERVED
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, TemperatureLogitsWarper

from tests.servers.scripted_server import HANG, ScriptedServer, refusal

PROMPT: Final = torch.tensor([[5, 6, 7]])
CAPABILITIES: Final = Capabilities(
    max_length=32,
    max_batch_size=4,
    vocab_size=50,
    eos_token_ids=[2],
    default_sampling=DefaultSampling(temperature=0.5, top_k=10, top_p=0.9),
)

#: A value of each parameter that no server serves.
REFUSED: Final[dict[str, Any]] = {
    "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)]),
    "prefix_allowed_tokens_fn": lambda row, ids: [1],
    "num_beams": 4,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["one"],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "top_h": 0.5,
    "guidance_scale": 1.5,
    "begin_suppress_tokens": [1],
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (5, 1.1),
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "remove_invalid_values": True,
    "watermarking_config": {"bias": 2.0},
    "token_healing": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "use_mtp": True,
    "custom_generate": "a/repository",
    "synced_gpus": True,
}
#: What transformers computes by, which changes no token, or says to itself.
WITHOUT_EFFECT: Final = {
    *("early_stopping", "length_penalty", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("speculation_type", "compile_config", "disable_compile", "continuous_batching_config", "low_memory"),
    *("prefill_chunk_size", "transformers_version", "_from_model_config", "decoder_start_token_id", "bos_token_id"),
}
SERVED: Final = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("bad_words_ids", "suppress_tokens", "sequence_bias", "forced_bos_token_id", "renormalize_logits"),
    *("num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate"),
    *("pad_token_id", "eos_token_id"),
}


def answer(*sequences: Sequence[int], ends: bool = True) -> list[Any]:
    """The events of a call, a token each."""
    events = [GenerateResponse(accepted=Accepted())]
    for index, tokens in enumerate(sequences):
        events += [GenerateResponse(sequence_index=index, delta=TokenDelta(tokens=[Token(id=one)])) for one in tokens]
        if ends:
            events.append(GenerateResponse(sequence_index=index, finished=Finished(reason=FINISH_REASON_LENGTH)))
    return events


@pytest.fixture
def model(server: ScriptedServer) -> Iterator[KilnForSampling]:
    server.script("GetDeployment", GetDeploymentResponse(deployment=Deployment(id="d", capabilities=CAPABILITIES)))
    model = KilnForSampling("d", server.address)
    yield model
    model.close()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_server_serves_is_refused_by_name(server: ScriptedServer, model: KilnForCausalLM, name: str) -> None:
    with pytest.raises(FeatureNotServed, match=name) as caught:
        model.generate(PROMPT, max_new_tokens=2, **{name: REFUSED[name]})
    (violation,) = caught.value.fields
    assert violation.field == name
    assert UNSERVED[name][1] in violation.description
    assert server.requests["Generate"] == []


@pytest.mark.parametrize("place", ["model", "argument"])
def test_generation_configs_are_looked_at(model: KilnForCausalLM, place: str) -> None:
    beams = GenerationConfig(num_beams=3)
    asked = {} if place == "model" else {"generation_config": beams}
    if place == "model":
        model.generation_config = beams
    with pytest.raises(FeatureNotServed, match="num_beams: got 3"):
        model.generate(PROMPT, **asked)


def test_biases_of_several_tokens_are_refused(model: KilnForCausalLM) -> None:
    with pytest.raises(FeatureNotServed, match="a bias for 2 tokens in a row"):
        model.generate(PROMPT, sequence_bias=[[[1, 2], 0.5]])


def test_unknown_names_are_refused(model: KilnForCausalLM) -> None:
    with pytest.raises(TypeError, match="there is no option 'temprature'; did you mean 'temperature'"):
        model.generate(PROMPT, temprature=1)


def test_every_parameter_of_transformers_is_known() -> None:
    """A new one of transformers is served, refused, or has no effect: it must not be dropped."""
    assert vars(GenerationConfig()).keys() == SERVED | WITHOUT_EFFECT | (UNSERVED.keys() & vars(GenerationConfig()))
    assert UNSERVED.keys() - REFUSED.keys() == {
        *("assistant_model", "assistant_tokenizer", "negative_prompt_ids", "negative_prompt_attention_mask"),
        *("inputs_embeds", "past_key_values", "cache"),
    }


def test_the_bundles_defaults_and_ends_are_asked_for(server: ScriptedServer, model: KilnForCausalLM) -> None:
    server.script("Generate", answer([8, 9]))
    assert model.generate(PROMPT, max_new_tokens=2, seed=4).tolist() == [[5, 6, 7, 8, 9]]
    (request,) = server.requests["Generate"]
    assert [*request.token_ids.ids] == [5, 6, 7]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 10, 4)
    assert request.sampling.top_p == pytest.approx(0.9)
    assert (request.stop.max_new_tokens, request.stop.ignore_eos, [*request.stop.stop_token_ids]) == (2, True, [2])


def test_a_prompt_of_several_sequences_is_one_request(server: ScriptedServer, model: KilnForCausalLM) -> None:
    server.script("Generate", answer([8, 2], [9, 9, 9]), answer([10], [11, 12]))
    prompts, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    made = model.generate(
        prompts, attention_mask=mask, max_new_tokens=3, num_return_sequences=2, seed=1, pad_token_id=0
    )
    first, second = ([*one.token_ids.ids] for one in server.requests["Generate"])
    assert (first, second) == ([5, 6], [7, 8, 9])
    assert [one.num_sequences for one in server.requests["Generate"]] == [2, 2]
    assert [one.sampling.seed for one in server.requests["Generate"]] == [1, 3]
    assert made.tolist() == [[0, 5, 6, 8, 2, 0], [0, 5, 6, 9, 9, 9], [7, 8, 9, 10, 0, 0], [7, 8, 9, 11, 12, 0]]


class Once(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.ones(len(input_ids), dtype=torch.bool)


def test_a_criterion_ends_the_request(server: ScriptedServer, model: KilnForCausalLM) -> None:
    server.script("Generate", [*answer([8], ends=False), HANG])
    assert model.generate(PROMPT, max_new_tokens=9, stopping_criteria=[Once()]).tolist() == [[5, 6, 7, 8]]
    assert server.cancelled["Generate"].wait(5)


def test_failures_end_the_call(server: ScriptedServer, model: KilnForCausalLM) -> None:
    server.script("Generate", [*answer([8], ends=False), refusal("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")])
    with pytest.raises(DeadlineExceeded):
        model.generate(PROMPT, max_new_tokens=3)
    server.script("Generate", answer([8], ends=False))
    with pytest.raises(StreamIncomplete):
        model.generate(PROMPT, max_new_tokens=3)
    with pytest.raises(TypeError):
        model.generate(PROMPT, max_new_tokens=3, logit_bias={1: "much"})


def test_the_names_of_neuron_lead_here(server: ScriptedServer, model: KilnForSampling) -> None:
    server.script("Generate", answer([8, 9]))
    config = model.config
    assert HuggingFaceGenerationModelAdapter(config, model) is HuggingFaceGenerationAdapter(model) is model
    model.to_neuron()
    model.reset_generation()
    assert model.neuron_config.max_length == 32
    assert model.sample(PROMPT, sequence_length=5, top_k=3).tolist() == [[5, 6, 7, 8, 9]]
    (request,) = server.requests["Generate"]
    assert (request.sampling.temperature, request.sampling.top_k, request.stop.max_new_tokens) == (1.0, 3, 2)


def test_several_outputs_of_padded_prompts_are_drawn(server: ScriptedServer, model: KilnForSampling) -> None:
    server.script("Generate", answer([8], [9]))
    model.num_outputs = 2
    drawn = model.sample(torch.tensor([[0, 5, 6]]), 4, torch.tensor([1]), no_repeat_ngram_size=3)
    assert drawn.tolist() == [[0, 5, 6, 8], [0, 5, 6, 9]]
    (request,) = server.requests["Generate"]
    assert ([*request.token_ids.ids], request.num_sequences, request.sampling.no_repeat_ngram_size) == ([5, 6], 2, 3)


def test_what_is_compiled_is_not_compiled_otherwise() -> None:
    with pytest.raises(ValueError, match="deployment d is compiled"):
        KilnForSampling.from_pretrained("nowhere", deployment_id="d", amp="bf16")
