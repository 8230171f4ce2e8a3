"""What a client sees of a running deployment: seeds, company, health, lost connections, new weights."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kiln.runtime.v1 import generation_pb2 as generation
from safetensors.numpy import save_file

from tests.checkpoints.random_weights import CONFIG as CHECKPOINT_CONFIG
from tests.checkpoints.random_weights import random_tensors
from tests.running_time import running_time
from tests.servers.stack import KILN, Stack, token_request, tokens_of
from tests.system.conftest import CONFIG, PIRATE, TINY
from tests.system.runtime_process import wait_until


def test_text_stream_follows_the_contract(stack: Stack, tiny: str) -> None:
    request = generation.GenerateRequest(
        deployment_id=tiny, text="Once upon a time", stop=generation.StopConditions(max_new_tokens=40)
    )
    request.sampling.temperature = 0
    request.output.logprobs = 2
    events = list(stack.generation().Generate(request))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].HasField("accepted")
    assert [event.HasField("finished") for event in events].count(True) == 1
    finished = events[-1].finished
    assert finished.usage.generated_tokens == len(tokens_of(events))
    assert finished.usage.prompt_tokens == events[0].accepted.prompt_token_count
    assert {event.weight_epoch for event in events} == {1}
    tokens = [token for event in events for token in event.delta.tokens]
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    assert all(token.top_logprobs[0].id == token.id for token in tokens), "greedy picks the most likely token"
    text = "".join(event.delta.text for event in events)
    ids = generation.DetokenizeRequest(deployment_id=tiny, token_ids=[token.id for token in tokens])
    assert stack.generation().Detokenize(ids).text.strip() == text.strip()


def test_same_seed_gives_same_tokens_in_any_company(stack: Stack, tiny: str) -> None:
    stub = stack.generation()

    def generate(seed: int, ids: list[int], count: int) -> list[int]:
        request = token_request(tiny, ids, count, temperature=1.0, top_k=50, top_p=0.95, seed=seed)
        return tokens_of(list(stub.Generate(request)))

    alone = generate(7, [5, 6, 7], 60)
    with ThreadPoolExecutor(8) as pool:
        mates = [pool.submit(generate, seed, list(range(3, 5 + seed)), 10 + 9 * seed) for seed in range(100, 107)]
        again = pool.submit(generate, 7, [5, 6, 7], 60).result()
        streams = [mate.result() for mate in mates]
    assert again == alone
    assert generate(8, [5, 6, 7], 60) != alone
    assert len({tuple(stream[:10]) for stream in streams}) > 1


def test_vanished_client_frees_its_slot(stack: Stack, tiny: str) -> None:
    steps_before = stack.get(tiny).load.steps
    command = [KILN, "generate", "--deployment", tiny, "--prompt", "Once", "--ignore-eos", "--json"]
    command += ["--max-new-tokens", "240", "--temperature", "0", "--runtime", stack.runtime]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert "accepted" in client.stdout.readline()
        wait_until(lambda: stack.get(tiny).load.used_slots == 1)
        client.kill()
    wait_until(lambda: stack.get(tiny).load.used_slots == 0)
    steps = stack.get(tiny).load.steps
    assert steps - steps_before < 240, "the stream was over before its client vanished: the check proves nothing"
    time.sleep(0.2)
    # The slot is free while a step still runs and the one behind it has been called; both count when they end.
    assert stack.get(tiny).load.steps <= steps + 2, "no client is left to compute for"


@pytest.mark.slow
def test_swapped_weights_write_other_text_and_reset_gives_a_receipt(stack: Stack) -> None:
    # A length that no other test compiles for.
    config = {"neuron_config": {**CONFIG["neuron_config"], "enable_bucketing": False, "max_context_length": 72}}
    config["neuron_config"].pop("context_encoding_buckets")
    config["neuron_config"].pop("token_generation_buckets")
    assert stack.compile("story", TINY, config)["cache"] == "miss"
    pirate = stack.compile("pirate", PIRATE, config)
    assert [executable["cache"] for executable in pirate["executables"]] == ["hit", "hit"], "same graphs, other weights"
    assert stack.compile("story", TINY, config)["cache"] == "hit"

    def story() -> dict[str, Any]:
        arguments = ["--prompt", "Once upon a time", "--max-new-tokens", "40", "--temperature", "0"]
        return stack.kiln("generate", "--deployment", "swapped", *arguments).last

    with stack.deployed("swapped", "story"):
        before = story()
        swapped = stack.kiln("load-weights", "swapped", "pirate").last
        assert swapped["weight_epoch"] == 2
        after = story()
        assert after["text"] != before["text"]
        stack.kiln("load-weights", "swapped", "story")
        assert story()["text"] == before["text"]
        receipt = stack.kiln("reset-kv", "swapped").last
        assert receipt["zeroed_bytes"] == stack.get("swapped").kv_bytes
        assert receipt["weight_epoch"] == 3
        check_streams_under_swaps(stack, "swapped", ("pirate", "story", "pirate"))


def check_streams_under_swaps(stack: Stack, deployment_id: str, refs: Sequence[str]) -> None:
    """Loads weights under streams that finish on the old ones: each has the tokens of one epoch from end to end."""
    is_over, first_epoch = threading.Event(), stack.get(deployment_id).roles[0].weight_epoch
    request = generation.GenerateRequest(
        deployment_id=deployment_id, text="Once upon a time", stop=generation.StopConditions(max_new_tokens=48)
    )
    request.sampling.temperature = 0

    def write() -> tuple[int, list[int]]:
        events = list(stack.generation().Generate(request))
        (epoch,) = {event.weight_epoch for event in events if event.HasField("delta")}
        return epoch, tokens_of(events)

    def write_on() -> list[tuple[int, list[int]]]:
        written = []
        while not is_over.is_set():
            written.append(write())
        return written

    _, before = write()
    with ThreadPoolExecutor(3) as pool:
        writing = [pool.submit(write_on) for _ in range(3)]
        for ref in refs:
            stack.kiln("load-weights", deployment_id, ref, "--in-flight", "finish_on_old", "--keep-old")
        is_over.set()
        written = [one for writer in writing for one in writer.result()]
    last_epoch, after = write()
    assert last_epoch == first_epoch + len(refs)
    expected = {first_epoch + index: (before, after)[index % 2] for index in range(len(refs) + 1)}
    assert before != after
    assert [tokens for _, tokens in written] == [expected[epoch] for epoch, _ in written]
    assert {epoch for epoch, _ in written} >= {*range(first_epoch, last_epoch)}


@pytest.mark.slow
def test_health_answers_during_a_long_prefill(stack: Stack) -> None:
    """The prompt is long enough for a prefill of over a second on two cores, and the model is soon written."""
    model = stack.new_model("long")
    write_long_checkpoint(model)
    config = {
        "neuron_config": {
            "seq_len": 4096,
            "max_context_length": 4088,
            "batch_size": 1,
            "torch_dtype": "float32",
            "on_device_sampling_config": {},
        }
    }
    stack.compile("long", model, config)
    channel = grpc.insecure_channel(stack.runtime)
    health = health_pb2_grpc.HealthStub(channel)
    health.Check(health_pb2.HealthCheckRequest())
    usage: list[generation.Usage] = []

    def prefill() -> None:
        for _ in range(3):
            events = list(
                stack.generation().Generate(token_request("long", [3 + index % 90 for index in range(4088)], 1))
            )
            usage.append(events[-1].finished.usage)

    latencies_s = []
    with stack.deployed("long"):
        thread = threading.Thread(target=prefill)
        thread.start()
        while thread.is_alive():
            with running_time() as taken:
                health.Check(health_pb2.HealthCheckRequest())
            latencies_s.append(taken.s)
            time.sleep(0.005)
        thread.join()
    longest = max(one.prefill_duration.ToTimedelta().total_seconds() for one in usage)
    p99 = statistics.quantiles(latencies_s, n=100)[98]
    assert longest > 0.8, f"the prefill took only {longest:.2f} s: the check proves nothing"
    assert p99 < 0.05, f"p99 {p99 * 1000:.0f} ms over {len(latencies_s)} checks during prefills of {longest:.2f} s"


def write_long_checkpoint(path: Path) -> None:
    config = CHECKPOINT_CONFIG | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, 0), path / "model.safetensors")
