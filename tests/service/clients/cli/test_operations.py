"""`kiln operations`."""

from __future__ import annotations

from collections.abc import Callable

from google.longrunning.operations_pb2 import ListOperationsResponse, Operation
from google.protobuf.empty_pb2 import Empty
from kiln.compiler.v1 import compiler_pb2

from tests.servers import responses as samples
from tests.servers.scripted_server import ScriptedServer, refusal
from tests.service.clients.conftest import Outcome

Kiln = Callable[..., Outcome]


def _operation(name: str, stage: str, **fields: object) -> Operation:
    operation = Operation(name=name, **fields)
    number = compiler_pb2.CompileStage.Value(f"COMPILE_STAGE_{stage}")
    operation.metadata.Pack(compiler_pb2.CompileMetadata(name="tiny", stage=number))
    return operation


def test_operations(server: ScriptedServer, kiln: Kiln) -> None:
    done = _operation("operations/2", "DONE", done=True)
    done.response.Pack(samples.watch_result().result)
    failed = _operation("operations/3", "DONE", done=True, error=refusal("CANCELLED", "COMPILE_CANCELLED"))
    running = _operation("operations/1", "LOWER")
    server.script("ListOperations", ListOperationsResponse(operations=[running, done, failed]))
    record = kiln("operations", "list", "--json").last
    assert [operation["metadata"]["stage"] for operation in record["operations"]] == ["lower", "done", "done"]
    assert record["operations"][1]["response"]["cache"] == "miss"
    assert record["operations"][2]["error"]["reason"] == "COMPILE_CANCELLED"
    lines = kiln("operations", "list").out.splitlines()
    assert [line.split(maxsplit=2)[2].strip() for line in lines[1:]] == ["lower", "done", "failed: CANCELLED"]


def test_no_operations(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("ListOperations", ListOperationsResponse())
    assert kiln("operations", "list", "--json").last == {"operations": []}
    assert kiln("operations", "list").out == "no operations\n"


def test_cancel(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("CancelOperation", Empty())
    record = kiln("operations", "cancel", "operations/1", "--json").last
    assert record == {"operation": "operations/1", "cancel_requested": True}
    assert kiln("operations", "cancel", "operations/1").out == "asked operations/1 to end\n"
    assert server.requests["CancelOperation"][0].name == "operations/1"
    server.script("CancelOperation", refusal("NOT_FOUND", "OPERATION_NOT_FOUND"))
    assert kiln("operations", "cancel", "operations/9", "--json").error["reason"] == "OPERATION_NOT_FOUND"


def test_wait(server: ScriptedServer, kiln: Kiln) -> None:
    server.script("WatchCompile", [samples.watch_progress("LOWER"), samples.watch_result()])
    lines = kiln("operations", "wait", "operations/7", "--json").lines
    assert [line["event"] for line in lines] == ["progress", "result"]
    assert (lines[1]["version"], lines[1]["operation"]) == ("tiny:v3", "operations/7")
    assert "tiny:v3" in kiln("operations", "wait", "operations/7").out
    server.script("WatchCompile", [refusal("NOT_FOUND", "OPERATION_NOT_FOUND")])
    assert kiln("operations", "wait", "operations/9", "--json").error["reason"] == "OPERATION_NOT_FOUND"
