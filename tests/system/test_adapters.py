"""Adapters from PEFT's files to tokens: compiled into a bundle, sharded for it later, loaded, and named by requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import peft
import pytest
import torch
from kiln_client import Runtime
from transformers import AutoModelForCausalLM

from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.adapters import make_adapter
from tests.checkpoints.tiny_models import TinyModel
from tests.servers.stack import Stack
from tests.system.conftest import TINY

PROMPT: Final = [1, 15, 4, 9, 30, 7]
COUNT: Final = 12
MODULES: Final = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
CONFIG: Final = {"seq_len": 64, "max_context_length": 32, "batch_size": 4, "tp_degree": 2, "torch_dtype": "float32"}


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


@torch.no_grad()
def greedy(model: Any) -> list[int]:
    """The tokens of transformers and PEFT, those behind an end of the text included."""
    ids = list(PROMPT)
    for _ in range(COUNT):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]
