"""Compiles that want graphs kept: what is built, shared and found again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.store.layout import Layout
from bundle.store.referrers import add_referrer
from compiler_svc.builds.debug_file import DEBUG_TYPE, TITLE, GraphsHeader, GraphsWriter, has_graphs
from compiler_svc.builds.job import BuildJob, BuildResult
from compiler_svc.compiles.build_runner import OnProgress
from compiler_svc.errors import BuildFailed
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.records import Progress, Stage
from tests.bundles.samples import publish_sample
from tests.servers.running_compiler import Client, DirectedRunner, response_of, serve_compiler

CODE = digest_bundle_code()
TRACING = "keeping the graph of token_generation_16"


def attach_graphs(store: Path, digest: str, code_digest: str = CODE) -> None:
    writer = GraphsWriter(GraphsHeader(bundle=digest, code_digest=code_digest, executables=0))
    add_referrer(Layout(store), digest, DEBUG_TYPE, DEBUG_TYPE, writer.finish(), title=TITLE)


class GraphRunner(DirectedRunner):
    """Attaches graphs without operations when the test allows it."""

    may_trace = True

    async def run(self, job: BuildJob, on_progress: OnProgress) -> BuildResult:
        if job.graphs_of is None:
            return await super().run(job, on_progress)
        self.jobs.append(job)
        await on_progress(Progress(stage=Stage.TRACE, message=TRACING))
        while not self.may_trace:  # noqa: ASYNC110 - a flag that tests set
            await asyncio.sleep(0.005)
        if self.error is not None:
            raise self.error
        attach_graphs(self.store, job.graphs_of)
        return BuildResult(bundle_digest=job.graphs_of, executables=(), new_executables={})

    @property
    def built(self) -> list[bool]:
        """Of every job, whether it was a build."""
        return [job.graphs_of is None for job in self.jobs]


@pytest.fixture
async def served(home: Path) -> AsyncIterator[tuple[Client, DirectedRunner]]:
    async with serve_compiler(home, "--max-builds", "2", runner=GraphRunner(home / "store")) as served:
        yield served


async def referrers(client: Client, ref: str) -> list[bundle_pb2.Blob]:
    response = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=ref))
    return list(response.bundle.referrers)


async def test_graphs_are_attached_to_the_bundle_that_a_plain_compile_gives_and_traced_once(
    client: Client, runner: GraphRunner
) -> None:
    runner.is_open.set()
    plain = await client.build()
    assert await referrers(client, "tiny") == []
    debug = await client.build(debug=True)
    assert (debug.digest, debug.version, debug.cache) == (plain.digest, 1, pb.CACHE_RESULT_HIT)
    assert [(one.title, one.media_type) for one in await referrers(client, "tiny")] == [(TITLE, DEBUG_TYPE)]
    assert runner.built == [True, False], "nothing was built for it"
    await client.build(debug=True)
    await client.build()
    assert runner.built == [True, False]
    await client.build(debug=True, skip_cache_lookup=True)
    assert runner.built == [True, False, True, False], "unless nothing is to be looked up"
    assert len(await referrers(client, "tiny")) == 1, "equal bytes are one referrer"


async def test_a_compile_that_joins_a_plain_build_gets_its_graphs(client: Client, runner: GraphRunner) -> None:
    plain = await client.compile(name="plain")
    await client.reach_build(plain)
    debug = await client.compile(name="debug", debug=True)
    await client.reach_build(debug)
    assert runner.built == [True], "one build for both"
    runner.is_open.set()
    assert response_of(await client.finish(plain)).digest == response_of(await client.finish(debug)).digest
    assert runner.built == [True, False]
    assert [one.title for one in await referrers(client, "debug")] == [TITLE]


async def test_a_plain_compile_does_not_wait_for_the_graphs_of_another(client: Client, runner: GraphRunner) -> None:
    runner.may_trace = False
    debug = [await client.compile(name=name, debug=True) for name in ("debug", "same")]
    for one in debug:
        await client.reach_build(one)
    runner.is_open.set()
    for one in debug:
        progress = await client.reach(one, TRACING)
        assert progress.stage == pb.COMPILE_STAGE_PUBLISH
        assert (progress.executables_done, progress.executables_total) == (1, 2), "what the build counted stays"
    assert (await client.build(name="plain")).version == 1
    runner.may_trace = True
    digests = {response_of(await client.finish(one)).digest for one in debug}
    assert len(digests) == 1
    assert runner.built == [True, False], "graphs are traced once for both"


async def test_cancelling_ends_the_tracing_and_graphs_that_fail_fail_the_compile_and_not_the_build(
    client: Client, runner: GraphRunner
) -> None:
    runner.is_open.set()
    runner.may_trace = False
    for error, code, reason in (
        (None, "CANCELLED", "COMPILE_CANCELLED"),
        (BuildFailed("no graphs"), "INTERNAL", "BUILD_FAILED"),
    ):
        debug = await client.compile(debug=True)
        await client.reach(debug, TRACING)
        if error is None:
            await client.cancel(debug.name)
        else:
            runner.error, runner.may_trace = error, True
        await client.fail(debug, code, reason)
    runner.error = None
    assert (await client.build()).cache == pb.CACHE_RESULT_HIT
    assert len(runner.discarded) >= 2, "the directories of both jobs are given up"
    await client.build(debug=True)
    assert runner.built == [True, False, False, False]


def test_graphs_that_cannot_be_read_or_are_of_other_sources_do_not_count(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "store")
    digest = publish_sample(layout)
    assert not has_graphs(layout, digest, CODE)
    for data in (b"no gzip", b""):
        add_referrer(layout, digest, DEBUG_TYPE, DEBUG_TYPE, data, title=TITLE)
        assert not has_graphs(layout, digest, CODE)
    attach_graphs(layout.root, digest, "sha256:older")
    assert not has_graphs(layout, digest, CODE)
    attach_graphs(layout.root, digest)
    assert has_graphs(layout, digest, CODE)
