"""Requests that have the inputs of their steps written to a file, over gRPC."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from kiln.runtime.v1 import generation_pb2 as pb
from safetensors import safe_open

from tests.hang_guard import until
from tests.ranks.fakes import expected_tokens
from tests.servers.refusals import assert_names_no_directory, read_refusal, refused
from tests.servers.runtime import (
    Runtime,
    hold,
    serve_runtime,
    token_request,
    tokens_of,
)


class CaptureFile:
    """A capture that was read."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "np") as file:
            self.metadata: dict[str, str] = file.metadata()
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    def of(self, what: str) -> dict[int, str]:
        """Metadata of every step by its index."""
        entries = (name.partition(".") for name in self.metadata if name.endswith(f".{what}"))
        return {int(step): self.metadata[f"{step}.{what}"] for step, _, _ in entries}


def capturing(prompt: list[int], steps: dict[str, int], max_new_tokens: int = 5, **options: Any) -> pb.GenerateRequest:
    request = token_request(prompt, max_new_tokens, **options)
    request.output.capture_inputs.CopyFrom(pb.InputCapture(**steps))
    return request


async def collect(call: Any) -> list[Any]:
    """Events of a call, even if it fails."""
    events: list[Any] = []
    with suppress(grpc.aio.AioRpcError):
        async for event in call:
            events.append(event)  # noqa: PERF401
    return events


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "captures"


@pytest.fixture
async def served(tmp_path: Path, directory: Path) -> AsyncIterator[Runtime]:
    async with serve_runtime(tmp_path, f"--capture-directory={directory}") as runtime:
        await runtime.deploy()
        yield runtime


async def test_chosen_steps_are_in_the_file_that_finished_names(served: Runtime, directory: Path) -> None:
    request = capturing([5, 6, 7], {"first_step": 0, "num_steps": 3}, request_id="mine", temperature=0.5, seed=4)
    events = await served.ask(request)
    path = Path(events[-1].finished.captured_inputs_path)
    assert (await served.get()).capabilities.input_capture
    assert path == directory / "d" / "mine.safetensors"
    assert not events[-1].finished.HasField("capture_status")
    file, steps = CaptureFile(path), served.ranks.steps
    assert file.of("executable") == {0: "context_encoding_8", 1: "token_generation_16", 2: "token_generation_16"}
    assert file.of("num_tokens") == {0: "3", 1: "1", 2: "1"}
    assert file.of("weight_epoch") == dict.fromkeys(range(3), "1")
    assert file.metadata["bundle"] == served.bundles.names["story"]
    for index, step in enumerate(steps[:3]):
        for name, values in step.inputs.items():
            tensor = file.tensors[f"{index}.{name}"]
            assert tensor.ravel().tolist() == np.asarray(values, dtype=tensor.dtype).tolist()
    shapes = {name: (str(tensor.dtype), tensor.shape) for name, tensor in file.tensors.items() if name[0] in "01"}
    assert shapes == {
        "0.input_ids": ("int32", (1, 8)),
        "0.position_ids": ("int32", (1, 8)),
        "0.seq_ids": ("int32", (1,)),
        "0.num_tokens": ("int32", (1,)),
        "0.sampling_params": ("float32", (1, 3)),
        "0.noise_keys": ("int32", (1, 2)),
        "1.input_ids": ("int32", (4, 1)),
        "1.position_ids": ("int32", (4, 1)),
        "1.seq_ids": ("int32", (4,)),
        "1.sampling_params": ("float32", (4, 3)),
        "1.noise_keys": ("int32", (4, 2)),
    }
    assert not any(name.startswith("3.") for name in file.tensors)


async def test_rows_of_others_in_the_batch_are_in_it(served: Runtime) -> None:
    call = await hold(served, token_request([9], 12))
    mine = asyncio.create_task(served.ask(capturing([5, 6], {"first_step": 1, "num_steps": 2})))
    await served.wait_for(lambda one: one.load.queued_requests)
    served.ranks.gate.set()
    events = await mine
    await collect(call)
    file = CaptureFile(Path(events[-1].finished.captured_inputs_path))
    rows = file.of("row")
    assert rows == {1: "1", 2: "1"}, "the other holds slot 0"
    others = expected_tokens([9], 12)
    for step, row in rows.items():
        ids = file.tensors[f"{step}.input_ids"].ravel().tolist()
        position = file.tensors[f"{step}.position_ids"].ravel().tolist()[0]
        assert ids[int(row)] == tokens_of(events)[step - 1]
        assert ids[0] == others[position - 1]
        assert file.tensors[f"{step}.seq_ids"].tolist() == [0, 1, 4, 4], "idle rows have the scratch slot"


async def test_one_step_is_the_default_and_an_early_end_leaves_fewer(served: Runtime) -> None:
    for steps, captured in (
        ({"first_step": 2}, [2]),
        ({"first_step": 3, "num_steps": 9}, [3, 4]),
        ({"first_step": 7}, []),
    ):
        events = await served.ask(capturing([5], steps))
        file = CaptureFile(Path(events[-1].finished.captured_inputs_path))
        assert sorted(file.of("row")) == captured
        assert file.metadata["captured_steps"] == str(len(captured))


async def test_without_a_directory_captures_are_not_served(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        deployment = await served.deploy()
        assert not deployment.capabilities.input_capture
        await refused(
            served.ask(capturing([5], {"first_step": 0})),
            "INVALID_ARGUMENT",
            "FEATURE_NOT_SERVED",
            "output.capture_inputs",
        )


async def test_an_unwritable_directory_refuses_the_request(served: Runtime, directory: Path) -> None:
    await asyncio.to_thread(directory.write_text, "in the way")
    errors = await refused(served.ask(capturing([5], {"first_step": 0})), "FAILED_PRECONDITION", "CAPTURE_UNWRITABLE")
    assert errors.metadata["path"] == "d"
    assert served.ranks.steps == []
    assert tokens_of(await served.generate([5, 6])) == expected_tokens([5, 6], 5)


async def test_a_file_that_cannot_be_written_costs_no_tokens(served: Runtime, directory: Path) -> None:
    served.ranks.gate.clear()
    running = asyncio.create_task(served.ask(capturing([5, 6], {"first_step": 0})))
    await served.wait_for_slots(1)
    shutil.rmtree(directory)
    served.ranks.gate.set()
    events = await running
    assert tokens_of(events) == expected_tokens([5, 6], 5)
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert not finished.HasField("status")
    assert finished.captured_inputs_path == ""
    assert read_refusal(finished.capture_status).reason == "CAPTURE_UNWRITABLE"
    assert_names_no_directory(str(finished.capture_status))


@pytest.mark.parametrize("end", ["abort", "loss", "cancellation"])
async def test_what_was_captured_before_an_early_end_is_written(served: Runtime, directory: Path, end: str) -> None:
    call = await hold(served, capturing([5, 6], {"first_step": 0, "num_steps": 9}, 40, request_id="gone"))
    if end == "abort":
        await served.generation.Abort(pb.AbortRequest(deployment_id="d", request_id="gone"))
    elif end == "loss":
        served.ranks.die()
    else:
        call.cancel()
    path = directory / "d" / "gone.safetensors"
    if end != "cancellation":
        assert (await collect(call))[-1].finished.captured_inputs_path == str(path)
    await until(path.exists)
    served.ranks.gate.set()
    file = CaptureFile(path)
    assert sorted(file.of("row")) == [0]
    assert file.tensors["0.input_ids"].ravel().tolist()[:2] == [5, 6]


async def test_a_refused_request_gives_its_place_back(served: Runtime) -> None:
    call = await hold(served, token_request([5], 40, request_id="taken"))
    for _ in range(20):
        await refused(
            served.ask(capturing([5], {"first_step": 0}, request_id="taken")), "ALREADY_EXISTS", "REQUEST_ID_IN_USE"
        )
    served.ranks.gate.set()
    call.cancel()
    assert (await served.ask(capturing([5], {"first_step": 0})))[-1].finished.captured_inputs_path


async def test_nobody_pays_for_what_nobody_asks(served: Runtime) -> None:
    await served.ask(capturing([5], {"first_step": 0}))
    engine = served.engine()
    assert engine.requests.num_captures == 0
    recorded: list[Any] = []
    engine._captures.record = lambda *step: recorded.append(step)  # type: ignore[method-assign,assignment]
    await served.generate([5, 6])
    assert recorded == []
