"""Attributes of a configuration that change what is computed, from the compile to the client, against transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kiln.runtime.v1 import generation_pb2 as generation
from kiln.runtime.v1 import runtime_pb2 as runtime
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.parity.reference import TOLERANCE, Reference, deviation, draw_prompt, write_checkpoint
from tests.servers.stack import Stack, token_request

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


def deploy(stack: Stack, name: str, reference: Reference, level: int, **attributes: Any) -> runtime.Deployment:
    """Compiles and loads a model, warmed up unless `skip_warmup` says otherwise, and tells what came of it."""
    stack.compile(name, reference.path, {"neuron_config": CONFIG | attributes}, level=level)
    stages = {event.get("stage") for event in stack.kiln("load", name, "--deployment", name).events}
    assert ("warmup" in stages) is not attributes.get("skip_warmup", False)
    return stack.runtime_service().GetDeployment(runtime.GetDeploymentRequest(deployment_id=name)).deployment


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
def test_left_padded_prompts_give_the_logits_of_transformers(stack: Stack, level: int) -> None:
    """At the edges of buckets, two prompts a step, with batch-mates; and prompts that are cut."""
    reference, name = write_model(stack, f"left-o{level}"), f"left-o{level}"
    told = deploy(
        stack,
        name,
        reference,
        level,
        padding_side="left",
        ctx_batch_size=2,
        n_active_tokens=16,
        n_positions=56,
        enable_bucketing=True,
        context_encoding_buckets=[8, 16],
        token_generation_buckets=[32, 56],
        max_new_tokens=60,
        allow_input_truncation=True,
        skip_warmup=True,
    )
    capabilities = told.capabilities
    assert (capabilities.padding_side, capabilities.logits, capabilities.input_truncation) == ("left", True, True)
    assert (capabilities.max_context_length, capabilities.max_length) == (16, 56)
    prompts = [draw_prompt(length) for length in (1, 7, 8, 9, 15, 16, 17, 40)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: generate(stack, name, ids, 10), prompts))
    for prompt, (accepted, tokens) in zip(prompts, answers, strict=True):
        assert accepted.truncated_tokens == max(0, len(prompt) - 16)
        assert accepted.prompt_token_count == min(len(prompt), 16)
        assert worst_deviation(reference, prompt[-16:], tokens) < TOLERANCE
    accepted, tokens = generate(stack, name, prompts[0], 60)
    assert (accepted.max_new_tokens, len(tokens)) == (55, 55), "sequences end at n_positions"


@pytest.mark.parametrize("level", LEVELS)
def test_weights_as_declared_take_the_memory_that_they_take_in_the_checkpoint(stack: Stack, level: int) -> None:
    """Embedding, queries and norms in float32, the rest in bfloat16: float32 products of the widened weights."""
    reference, name = write_model(stack, f"declared-o{level}"), f"declared-o{level}"
    path = reference.path / "model.safetensors"
    wide = ("norm", "q_proj", "embed")
    mixed = {
        key: tensor.to(torch.float32 if any(part in key for part in wide) else torch.bfloat16)
        for key, tensor in load_file(path).items()
    }
    save_file(mixed, path, metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained(reference.path, dtype=torch.float32).eval()
    told = deploy(stack, name, reference, level, cast_type="as-declared")
    checkpoint_bytes = sum(tensor.nbytes for tensor in mixed.values())
    assert 0 <= told.weights_bytes - checkpoint_bytes < 1000, "all but the rotary frequencies"
    prompt = draw_prompt(11)
    accepted, tokens = generate(stack, name, prompt, 30)
    assert (accepted.max_new_tokens, len(tokens)) == (16, 16), "seq_len - max_context_length is the default limit"
    assert worst_deviation(Reference(reference.path, model), prompt, tokens) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_float16_is_as_near_to_float32_as_transformers_is(stack: Stack, level: int) -> None:
    written, name = write_model(stack, f"half-o{level}"), f"half-o{level}"
    narrow = written.model.half()
    narrow.save_pretrained(written.path)
    wide = Reference(written.path, LlamaForCausalLM.from_pretrained(written.path, dtype=torch.float32).eval())
    told = deploy(stack, name, written, level, torch_dtype="float16", max_new_tokens=40)
    narrow_bytes = sum(tensor.nbytes for tensor in load_file(written.path / "model.safetensors").values())
    assert 0 <= told.weights_bytes - narrow_bytes < 1000, "all but the rotary frequencies"
    prompt = draw_prompt(11)
    _, tokens = generate(stack, name, prompt, 40)
    ours = worst_deviation(wide, prompt, tokens)
    ids = [*prompt, *(token.id for token in tokens[:-1])]
    theirs = deviation(Reference(written.path, narrow).step_logits(ids, 11), wide.step_logits(ids, 11))
    assert 0 < ours < 1.5 * theirs


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"max_batch_size": 4, "batch_size": 1, "tkg_batch_size": 2}, id="fewer rows than slots"),
        pytest.param(
            {"batch_size": 4, "enable_bucketing": True, "token_generation_batches": [1, 2]}, id="several batch sizes"
        ),
        # 96 positions: four sequences of up to 50 tokens are preempted, and computed again in chunks.
        pytest.param(
            {
                "batch_size": 4,
                "ctx_batch_size": 1,
                "is_block_kv_layout": True,
                "pa_block_size": 8,
                "pa_num_blocks": 12,
                "is_continuous_batching": True,
            },
            id="fewer blocks than sequences need",
        ),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_sequences_that_share_rows_or_blocks(
    stack: Stack, level: int, attributes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Four streams at once, of different lengths."""
    name = f"{request.node.callspec.id.replace(' ', '-')}"
    reference = write_model(stack, name)
    assert deploy(stack, name, reference, level, **attributes).capabilities.max_batch_size == 4
    prompts = [draw_prompt(length) for length in (3, 9, 21, 34)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: generate(stack, name, ids, 16), prompts))
    # Other tests of the stack need its cores.
    stack.kiln("unload", name)
    for prompt, (_, tokens) in zip(prompts, answers, strict=True):
        assert len(tokens) == 16
        assert worst_deviation(reference, prompt, tokens) < TOLERANCE


@pytest.mark.parametrize("level", LEVELS)
def test_attention_in_a_dtype_of_its_own_is_coarser_and_keeps_smaller_keys(stack: Stack, level: int) -> None:
    reference, name = write_model(stack, f"attention-o{level}"), f"attention-o{level}"
    deploy(stack, name, reference, level, cast_type="as-declared", attention_dtype="bfloat16", max_new_tokens=40)
    manifest = stack.kiln("bundles", "show", name).last["manifest"]
    assert {tensor["dtype"] for tensor in manifest["state"]["tensors"]} == {"bfloat16"}
    assert {tensor["dtype"] for tensor in manifest["weight_sets"][0]["shards"][0]["tensors"]} == {"float32"}
    prompt = draw_prompt(11)
    _, tokens = generate(stack, name, prompt, 40)
    assert TOLERANCE < worst_deviation(reference, prompt, tokens) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_ranks_that_divide_the_vocabulary_store_a_tied_head_once(stack: Stack, level: int) -> None:
    reference, name = write_model(stack, f"vocabulary-o{level}"), f"vocabulary-o{level}"
    deploy(stack, name, reference, level, tp_degree=2, vocab_parallel=True)
    manifest = stack.kiln("bundles", "show", name).last["manifest"]
    shapes = {one["name"]: one["shape"] for one in manifest["weight_sets"][0]["shards"][1]["tensors"]}
    hidden = reference.model.config.hidden_size
    assert shapes["model.embed_tokens.weight"] == [106, hidden]
    assert "lm_head.weight" not in shapes
    prompt = draw_prompt(11)
    _, tokens = generate(stack, name, prompt, 16)
    # Other tests of the stack need its cores.
    stack.kiln("unload", name)
    assert worst_deviation(reference, prompt, tokens) < TOLERANCE
