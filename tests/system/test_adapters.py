"""Adapters from PEFT's files to tokens: compiled into a bundle, sharded for it later, loaded, and named by requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import peft
import pytest
import torch
from kiln.runtime.v1 import generation_pb2 as generation
from kiln_client import Runtime
from transformers import AutoModelForCausalLM

from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.adapters import make_adapter
from tests.checkpoints.tiny_models import TinyModel
from tests.servers.stack import Stack, token_request, tokens_of
from tests.system.conftest import TINY

PROMPT: Final = [1, 15, 4, 9, 30, 7]
COUNT: Final = 12
MODULES: Final = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
CONFIG: Final = {
    "seq_len": 64,
    "max_context_length": 32,
    "batch_size": 4,
    "tp_degree": 2,
    "torch_dtype": "float32",
    "output_prompt_logprobs": True,
    "output_embeddings": True,
}


@pytest.fixture(scope="module")
def models(stack: Stack) -> dict[str, tuple[Path, peft.PeftModel]]:
    """The shipped model with adapters of PEFT, by name, and where PEFT wrote them."""
    tiny = TinyModel(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), Checkpoint.open(TINY))
    paths = {name: stack.new_model(name) for name in ("house", "pirate")}
    options: dict[str, dict[str, Any]] = {"house": {"r": 2, "target_modules": ["q_proj", "v_proj"]}, "pirate": {}}
    return {
        name: (path, make_adapter(tiny, path, seed=seed, **options[name]))
        for seed, (name, path) in enumerate(paths.items())
    }


@pytest.fixture(scope="module")
def served(stack: Stack, models: dict[str, tuple[Path, peft.PeftModel]]) -> Iterator[str]:
    """A deployment with room for two adapters, whose bundle has `house`; `pirate` is loaded into it."""
    lora: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8, "target_modules": MODULES}
    lora["lora_ckpt_paths"] = {"house": str(models["house"][0])}
    stack.compile("roomy", TINY, {"neuron_config": CONFIG | {"lora_config": lora}})
    with stack.deployed("roomy"):
        yield "roomy"


def test_requests_get_the_tokens_of_their_adapters_in_one_batch(
    stack: Stack, served: str, models: dict[str, tuple[Path, peft.PeftModel]]
) -> None:
    stack.kiln("adapters", "shard", models["pirate"][0], "--executables", served, "--name", "pirate")
    loaded = stack.kiln("adapters", "load", "pirate", "--deployment", served).last
    assert loaded["name"] == "pirate"
    listed = stack.kiln("adapters", "list", "--deployment", served).last
    assert ([one["name"] for one in listed["adapters"]], listed["num_slots"]) == (["house", "pirate"], 2)

    names = ["", "house", "pirate", ""]
    with Runtime(stack.runtime, token=stack.token) as runtime, ThreadPoolExecutor(4) as pool:

        def generate(adapter: str) -> list[int]:
            options = {"max_new_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
            return runtime.complete(served, PROMPT, adapter=adapter, **options).token_ids

        tokens = list(pool.map(generate, names))
    base = models["house"][1]
    with base.disable_adapter():
        expected = {"": greedy(base)}
    expected |= {name: greedy(model) for name, (_, model) in models.items()}
    assert tokens == [expected[name] for name in names]
    assert len({tuple(one) for one in expected.values()}) == 3


@pytest.mark.parametrize("adapter", ["", "house"])
def test_prompts_are_told_by_their_adapters_whatever_processors_change(
    stack: Stack, served: str, models: dict[str, tuple[Path, peft.PeftModel]], adapter: str
) -> None:
    model = models["house"][1]
    with torch.no_grad(), nullcontext() if adapter else model.disable_adapter():
        expected = model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True)
    request = token_request(served, PROMPT, 2, temperature=0.0)
    request.adapter = adapter
    request.sampling.logit_bias[50] = 100
    request.output.prompt_logprobs = 3
    inputs = [generation.EmbedInput(token_ids=generation.TokenIds(ids=PROMPT))]
    embedding = generation.EmbedRequest(deployment_id=served, inputs=inputs, adapter=adapter)
    with ThreadPoolExecutor(2) as pool:
        telling = pool.submit(lambda: list(stack.generation().Generate(request)))
        (vector,) = stack.generation().Embed(embedding).embeddings
    assert tokens_of(telling.result()) == [50, 50]
    told = [token for event in telling.result() for token in event.prompt.tokens]
    logprobs = expected.logits[0].log_softmax(dim=-1)
    own = logprobs[range(len(PROMPT) - 1), PROMPT[1:]]
    torch.testing.assert_close(torch.tensor([token.logprob for token in told[1:]]), own, atol=1e-4, rtol=0)
    top = torch.tensor([[one.logprob for one in token.top_logprobs] for token in told[1:]])
    torch.testing.assert_close(top, logprobs[:-1].topk(3).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(vector.values), expected.hidden_states[-1][0, -1], atol=1e-4, rtol=0)


@torch.no_grad()
def greedy(model: Any) -> list[int]:
    """The tokens of transformers and PEFT, those behind an end of the text included."""
    ids = list(PROMPT)
    for _ in range(COUNT):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]
