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

from tests.hang_guard import HANG_S
from tests.ranks.fakes import expected_tokens
from tests.servers.runtime import (
    Runtime,
    assert_names_no_directory,
    details_of,
    details_of_status,
    fields_of,
    hold,
    raises,
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


def occupy(directory: Path) -> None:
    directory.write_text("in the way")


async def collect(call: Any) -> list[Any]:
    """Events of a call, even if it fails."""
    events: list[Any] = []
    with suppress(grpc.aio.AioRpcError):
        async for event in call:
            events.append(event)  # noqa: PERF401
    return events


async def run(served: Runtime, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [event async for event in served.generation.Generate(request)]


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
    events = await run(served, request)
    path = Path(events[-1].finished.captured_inputs_path)
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
        "0.rand": ("float32", (1, 1)),
        "1.input_ids": ("int32", (4, 1)),
        "1.position_ids": ("int32", (4, 1)),
        "1.seq_ids": ("int32", (4,)),
        "1.sampling_params": ("float32", (4, 3)),
        "1.rand": ("float32", (4, 1)),
    }
    assert not any(name.startswith("3.") for name in file.tensors)


async def test_rows_of_others_in_the_batch_are_in_it(served: Runtime) -> None:
    call = await hold(served, token_request([9], 12))
    mine = asyncio.create_task(run(served, capturing([5, 6], {"first_step": 1, "num_steps": 2})))
    async with asyncio.timeout(HANG_S):
        while not (await served.get()).load.queued_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
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
        events = await run(served, capturing([5], steps))
        file = CaptureFile(Path(events[-1].finished.captured_inputs_path))
        assert sorted(file.of("row")) == captured
        assert file.metadata["captured_steps"] == str(len(captured))


async def test_bad_values_are_named_by_field(served: Runtime) -> None:
    for steps, field in (
        ({"first_step": -1}, "output.capture_inputs.first_step"),
        ({"first_step": 0, "num_steps": 0}, "output.capture_inputs.num_steps"),
        ({"first_step": 0, "num_steps": 1025}, "output.capture_inputs.num_steps"),
    ):
        async with raises("INVALID_ARGUMENT", "REQUEST_INVALID") as errors:
            await run(served, capturing([5], steps))
        assert fields_of(errors[0]) == [field]


async def test_without_a_directory_captures_are_not_served(tmp_path: Path) -> None:
    async with serve_runtime(tmp_path) as served:
        deployment = await served.deploy()
        assert not deployment.capabilities.input_capture
        async with raises("INVALID_ARGUMENT", "FEATURE_NOT_SERVED") as errors:
            await run(served, capturing([5], {"first_step": 0}))
        assert fields_of(errors[0]) == ["output.capture_inputs"]


async def test_deployments_tell_that_inputs_can_be_captured(served: Runtime) -> None:
    assert (await served.get()).capabilities.input_capture


async def test_an_unwritable_directory_refuses_the_request(served: Runtime, directory: Path) -> None:
    occupy(directory)
    async with raises("FAILED_PRECONDITION", "CAPTURE_UNWRITABLE") as errors:
        await run(served, capturing([5], {"first_step": 0}))
    assert details_of(errors[0])[0].metadata["path"] == "d"
    assert served.ranks.steps == []
    assert tokens_of(await served.generate([5, 6])) == expected_tokens([5, 6], 5)


async def test_a_file_that_cannot_be_written_costs_no_tokens(served: Runtime, directory: Path) -> None:
    served.ranks.gate.clear()
    running = asyncio.create_task(run(served, capturing([5, 6], {"first_step": 0})))
    await served.wait_for_slots(1)
    shutil.rmtree(directory)
    served.ranks.gate.set()
    events = await running
    assert tokens_of(events) == expected_tokens([5, 6], 5)
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert not finished.HasField("status")
    assert finished.captured_inputs_path == ""
    assert details_of_status(finished.capture_status)[0].reason == "CAPTURE_UNWRITABLE"
    assert_names_no_directory(str(finished.capture_status))


async def test_what_an_aborted_request_captured_is_written(served: Runtime, directory: Path) -> None:
    call = await hold(served, capturing([5, 6], {"first_step": 0, "num_steps": 9}, 40, request_id="gone"))
    await served.generation.Abort(pb.AbortRequest(deployment_id="d", request_id="gone"))
    events = await collect(call)
    assert events[-1].finished.reason == pb.FINISH_REASON_ABORTED
    assert sorted(CaptureFile(Path(events[-1].finished.captured_inputs_path)).of("row")) == [0]
    served.ranks.gate.set()


async def test_the_step_that_killed_a_rank_is_in_the_file(served: Runtime) -> None:
    call = await hold(served, capturing([5, 6], {"first_step": 0, "num_steps": 9}, 40))
    served.ranks.die()
    events = await collect(call)
    assert events[-1].finished.reason == pb.FINISH_REASON_ERROR
    file = CaptureFile(Path(events[-1].finished.captured_inputs_path))
    assert file.tensors["0.input_ids"].ravel().tolist()[:2] == [5, 6]


async def test_what_a_client_that_left_captured_is_written(served: Runtime, directory: Path) -> None:
    call = await hold(served, capturing([5, 6], {"first_step": 0, "num_steps": 9}, 40, request_id="left"))
    call.cancel()
    async with asyncio.timeout(HANG_S):
        while not (directory / "d" / "left.safetensors").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    served.ranks.gate.set()
    assert sorted(CaptureFile(directory / "d" / "left.safetensors").of("row")) == [0]


async def test_a_refused_request_gives_its_place_back(served: Runtime) -> None:
    call = await hold(served, token_request([5], 40, request_id="taken"))
    for _ in range(20):
        async with raises("ALREADY_EXISTS", "REQUEST_ID_IN_USE"):
            await run(served, capturing([5], {"first_step": 0}, request_id="taken"))
    served.ranks.gate.set()
    call.cancel()
    assert (await run(served, capturing([5], {"first_step": 0})))[-1].finished.captured_inputs_path


async def test_nobody_pays_for_what_nobody_asks(served: Runtime) -> None:
    await run(served, capturing([5], {"first_step": 0}))
    engine = served.server.deployments.get("d").engine
    assert engine is not None
    assert engine.requests.num_captures == 0
    recorded: list[Any] = []
    engine._captures.record = lambda *step: recorded.append(step)  # type: ignore[method-assign,assignment]
    await served.generate([5, 6])
    assert recorded == []
