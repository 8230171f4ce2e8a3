"""Attributes of a configuration that change what is computed, from the compile to the client, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from compiler_svc.models.transforms import Quantization
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import TOLERANCE, TinyModel, deviation, write_tiny_model
from tests.contract.families.test_quantized_logits import replace_matrices
from tests.parity.geometries import GEOMETRIES
from tests.parity.reference import Reference, draw_prompt, write_checkpoint
from tests.servers.stack import Stack, token_request, tokens_of

GEOMETRY = "gqa4-tied-llama3"
LEVELS = [0, pytest.param(1, marks=[pytest.mark.toolchain, pytest.mark.slow])]
CONFIG = {
    "seq_len": 64,
    "max_context_length": 48,
    "batch_size": 3,
    "torch_dtype": "float32",
    "output_logits": True,
    "on_device_sampling_config": {"dynamic": True},
}


@contextmanager
def deployed(
    stack: Stack, name: str, reference: Reference, level: int, **attributes: Any
) -> Iterator[runtime.Deployment]:
    """Compiles and loads a model, warmed up unless `skip_warmup` says otherwise; gives what the runtime says of it."""
    stack.compile(name, reference.path, {"neuron_config": CONFIG | attributes}, level=level)
    with stack.deployed(name) as events:
        assert ("warmup" in {event.get("stage") for event in events}) is not attributes.get("skip_warmup", False)
        yield stack.get(name)


def generate(stack: Stack, deployment: str, ids: list[int], count: int) -> tuple[generation.Accepted, list[Any]]:
    """Generates greedily; returns how the runtime understood the prompt, and the tokens with their logits."""
    request = token_request(deployment, ids, count, temperature=0.0)
    request.output.logits = True
    events = list(stack.generation().Generate(request))
    return events[0].accepted, [token for event in events for token in event.delta.tokens]


def worst_deviation(reference: Reference, prompt: list[int], tokens: list[Any]) -> float:
    """Largest deviation of any token's logits, as a share of the largest logit of transformers on the same tokens."""
    expected = reference.step_logits([*prompt, *(token.id for token in tokens[:-1])], len(prompt))
    return deviation(torch.tensor([list(token.logits) for token in tokens]), expected)


def write_model(stack: Stack, name: str) -> Reference:
    return write_checkpoint(stack.new_model(name), GEOMETRY)


@pytest.mark.parametrize("level", LEVELS)
def test_quantized_weights_give_the_logits_of_what_is_left_of_them(stack: Stack, level: int) -> None:
    name = f"quantized-o{level}"
    reference = write_model(stack, name)
    leave_quantized(reference)
    model = write_tiny_model(stack.new_model(f"{name}-tuned"), GEOMETRIES[GEOMETRY], seed=1)
    tuned = Reference(model.checkpoint.path, model.model)
    leave_quantized(tuned)
    prompt = draw_prompt(20)
    with deployed(stack, name, reference, level, quantized=True, quantization_type="per_channel_symmetric"):
        _, tokens = generate(stack, name, prompt, 12)
        assert worst_deviation(reference, prompt, tokens) < TOLERANCE
        stack.kiln("shard-weights", name, "--model", tuned.path, "--name", f"{name}-tuned")
        stack.kiln("load-weights", name, f"{name}-tuned")
        _, tokens = generate(stack, name, prompt, 12)
        assert worst_deviation(tuned, prompt, tokens) < TOLERANCE


def leave_quantized(reference: Reference) -> None:
    """Gives the reference what int8 leaves of its matrices."""
    tiny = TinyModel(reference.model, Checkpoint.open(reference.path))
    replace_matrices(tiny, tiny.checkpoint.description, Quantization(format="int8_per_channel"))


LEFT = {
    "padding_side": "left",
    "ctx_batch_size": 2,
    "n_active_tokens": 16,
    "n_positions": 56,
    "enable_bucketing": True,
    "context_encoding_buckets": [8, 16],
    "token_generation_buckets": [32, 56],
    "max_new_tokens": 60,
    "allow_input_truncation": True,
    "skip_warmup": True,
}


@pytest.mark.parametrize("level", LEVELS)
def test_left_padded_prompts_give_the_logits_of_transformers(stack: Stack, level: int) -> None:
    """At the edges of buckets, two prompts a step, with batch-mates; and prompts that are cut."""
    reference, name = write_model(stack, f"left-o{level}"), f"left-o{level}"
    prompts = [draw_prompt(length) for length in (1, 7, 8, 9, 15, 16, 17, 40)]
    with deployed(stack, name, reference, level, **LEFT) as told, ThreadPoolExecutor(len(prompts)) as pool:
        capabilities = told.capabilities
        answers = list(pool.map(lambda ids: generate(stack, name, ids, 10), prompts))
        longest, most = generate(stack, name, prompts[0], 60)
    assert (capabilities.padding_side, capabilities.logits, capabilities.input_truncation) == ("left", True, True)
    assert (capabilities.max_context_length, capabilities.max_length) == (16, 56)
    for prompt, (accepted, tokens) in zip(prompts, answers, strict=True):
        assert accepted.truncated_tokens == max(0, len(prompt) - 16)
        assert accepted.prompt_token_count == min(len(prompt), 16)
        assert worst_deviation(reference, prompt[-16:], tokens) < TOLERANCE
    assert (longest.max_new_tokens, len(most)) == (55, 55), "sequences end at n_positions"


#: 96 positions: four sequences of up to 50 tokens are preempted, and computed again in chunks.
FEW_BLOCKS = {"ctx_batch_size": 1, "is_block_kv_layout": True, "pa_block_size": 8, "pa_num_blocks": 12}
SHARED = {
    "fewer-rows-than-slots": {"max_batch_size": 4, "batch_size": 1, "tkg_batch_size": 2},
    "several-batch-sizes": {"batch_size": 4, "enable_bucketing": True, "token_generation_batches": [1, 2]},
    "fewer-blocks-than-sequences-need": {"batch_size": 4, "is_continuous_batching": True, **FEW_BLOCKS},
}


@pytest.mark.parametrize(
    "sharing", [pytest.param(one, marks=[] if "blocks" in one else pytest.mark.slow) for one in SHARED]
)
@pytest.mark.parametrize("level", LEVELS)
def test_sequences_that_share_rows_or_blocks(stack: Stack, level: int, sharing: str) -> None:
    """Four streams at once, of different lengths."""
    name = f"{sharing}-o{level}"
    reference = write_model(stack, name)
    prompts = [draw_prompt(length) for length in (3, 9, 21, 34)]
    with deployed(stack, name, reference, level, **SHARED[sharing]) as told, ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: generate(stack, name, ids, 16), prompts))
    assert told.capabilities.max_batch_size == 4
    for prompt, (_, tokens) in zip(prompts, answers, strict=True):
        assert len(tokens) == 16
        assert worst_deviation(reference, prompt, tokens) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("attributes", "smallest", "largest"),
    [
        ({"cast_type": "as-declared"}, 0, TOLERANCE),
        ({"cast_type": "as-declared", "attention_dtype": "bfloat16"}, TOLERANCE, 0.05),
        ({"torch_dtype": "float16"}, 0, 0.005),
        ({"tp_degree": 2, "vocab_parallel": True}, 0, TOLERANCE),
    ],
    ids=["as-declared", "attention", "float16", "vocabulary"],
)
def test_other_dtypes_and_divisions(
    stack: Stack, level: int, attributes: dict[str, Any], smallest: float, largest: float
) -> None:
    """Embedding, queries and norms are declared as float32, the rest as bfloat16."""
    name = f"{'-'.join(attributes)}-o{level}"
    path = write_model(stack, name).path
    weights = path / "model.safetensors"
    mixed = {
        key: tensor.to(torch.float32 if any(part in key for part in ("norm", "q_proj", "embed")) else torch.bfloat16)
        for key, tensor in load_file(weights).items()
    }
    save_file(mixed, weights, metadata={"format": "pt"})
    reference = Reference(path, LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    prompt = draw_prompt(11)
    with deployed(stack, name, reference, level, **attributes):
        accepted, tokens = generate(stack, name, prompt, 30)
    assert (accepted.max_new_tokens, len(tokens)) == (16, 16), "seq_len - max_context_length is the default limit"
    assert smallest < worst_deviation(reference, prompt, tokens) < largest


TELLING = {
    "logit_processors": True,
    "output_prompt_logprobs": True,
    "output_embeddings": True,
    "output_logits": False,
    "tp_degree": 2,
    "enable_bucketing": True,
    "context_encoding_buckets": [16],
    "is_block_kv_layout": True,
    "is_prefix_caching": True,
    "pa_num_blocks": 32,
    "pa_block_size": 8,
}


@pytest.mark.parametrize("level", LEVELS)
def test_prompts_are_told_as_transformers_has_them(stack: Stack, level: int) -> None:
    """Three chunks, of ranks that divide the vocabulary, also if the cache holds the prompt, or processors run."""
    name = f"prompts-o{level}"
    reference, prompt = write_model(stack, name), draw_prompt(41)
    with torch.no_grad():
        output = reference.model(torch.tensor([prompt]), output_hidden_states=True)
    expected, hidden = output.logits[0].log_softmax(dim=-1)[:-1], output.hidden_states[-1][0]
    request = token_request(name, prompt, 2, temperature=0.0)
    request.output.prompt_logprobs = 4
    biased = deepcopy(request)
    biased.sampling.logit_bias[7] = 100
    with deployed(stack, name, reference, level, **TELLING):
        for asked in (request, request, biased):
            events = list(stack.generation().Generate(asked))
            assert (tokens_of(events) == [7, 7]) == (asked is biased)
            tokens = [token for event in events for token in event.prompt.tokens]
            assert [token.id for token in tokens] == prompt
            assert not tokens[0].HasField("logprob")
            told = torch.tensor([token.logprob for token in tokens[1:]])
            close(told, expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0])
            top = expected.topk(4, dim=-1)
            close(torch.tensor([[one.logprob for one in token.top_logprobs] for token in tokens[1:]]), top.values)
            ids = torch.tensor([[one.id for one in token.top_logprobs] for token in tokens[1:]])
            close(expected.gather(-1, ids), top.values)
        for pooling, wanted in ((generation.POOLING_LAST, hidden[-1:]), (generation.POOLING_MEAN, hidden)):
            inputs = [generation.EmbedInput(token_ids=generation.TokenIds(ids=ids)) for ids in (prompt, prompt[:20])]
            embedding = generation.EmbedRequest(deployment_id=name, inputs=inputs, pooling=pooling)
            first, second = stack.generation().Embed(embedding).embeddings
            close(torch.tensor(first.values), wanted.mean(dim=0))
            with torch.no_grad():
                shorter = reference.model(torch.tensor([prompt[:20]]), output_hidden_states=True).hidden_states[-1][0]
            close(torch.tensor(second.values), (shorter[-1:] if len(wanted) == 1 else shorter).mean(dim=0))


def close(told: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)
