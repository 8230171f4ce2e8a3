"""The whole service on every database."""

from pathlib import Path

from google.longrunning import operations_pb2
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from tests.servers.running_compiler import response_of, serve_compiler


async def test_a_compile_outlives_a_restart_and_gets_a_version(url: str, home: Path) -> None:
    async with serve_compiler(home, "--database", url) as (client, _):
        operation = await client.compile(request_id="r")
        await client.reach_build(operation)
    async with serve_compiler(home, "--database", url) as (client, runner):
        assert (await client.compile(request_id="r")).name == operation.name
        runner.is_open.set()
        response = response_of(await client.finish(operation))
        assert (response.version, response.cache) == (1, pb.CACHE_RESULT_MISS)
        again = response_of(await client.finish(await client.compile(name="other")))
        assert (again.version, again.cache, again.digest) == (1, pb.CACHE_RESULT_HIT, response.digest)
        await client.bundles.SetAlias(bundle_pb2.SetAliasRequest(ref="tiny:v1", alias="prod"))
        listed = await client.bundles.ListBundles(bundle_pb2.ListBundlesRequest())
        assert [(one.name, list(one.aliases)) for one in listed.bundles] == [("other", []), ("tiny", ["prod"])]
        found = await client.operations.ListOperations(operations_pb2.ListOperationsRequest(page_size=1))
        assert (len(found.operations), bool(found.next_page_token)) == (1, True)
