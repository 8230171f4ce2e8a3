"""The trace of a Compile call goes on through the stages of the compile."""

from __future__ import annotations

from pathlib import Path

from kiln.compiler.v1 import compiler_pb2 as pb

from tests.servers.running_compiler import serve_compiler
from tests.servers.traces import CLIENT_SPAN_ID, TRACE_ID, TRACED, collect_traces


async def test_stages_of_a_compile(home: Path) -> None:
    with collect_traces() as collector:
        async with serve_compiler(home, "--trace-endpoint", collector.endpoint) as (client, runner):
            runner.is_open.set()
            request = pb.CompileRequest(name="tiny", model="tiny", config_json="{}")
            operation = await client.compiler.Compile(request, metadata=TRACED)
            await client.finish(operation)
        call = collector.find("kiln.compiler.v1.CompilerService/Compile")
        assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE_ID, CLIENT_SPAN_ID)
        stages = collector.children(call)
        assert stages[:2] == ["queued", "cache_check"]
        assert "lower" in stages
