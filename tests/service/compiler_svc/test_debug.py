"""Compiles that want graphs kept: what is built, shared and found again."""

import asyncio
from pathlib import Path

import grpc
from kiln.bundle.v1 import bundle_pb2
from kiln.compiler.v1 import compiler_pb2 as pb

from bundle.layout import Layout
from bundle.referrers import add_referrer
from compiler_svc.builds.debug_file import DEBUG_TYPE, TITLE, GraphsHeader, GraphsWriter, has_graphs
from compiler_svc.builds.job import BuildJob, BuildResult
from compiler_svc.compiles.build_runner import OnProgress
from compiler_svc.errors import BuildFailed
from compiler_svc.planning.code_digest import digest_bundle_code
from compiler_svc.records import Progress, Stage
from tests.bundles.samples import publish_sample
from tests.servers.running_compiler import (
    Client,
    DirectedRunner,
    read_refusal,
    response_of,
    serve_compiler,
)

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


def make_runner(home: Path, *, may_build: bool = True) -> GraphRunner:
    runner = GraphRunner(home / "store")
    if may_build:
        runner.is_open.set()
    return runner


async def compile_(client: Client, **fields: object) -> pb.CompileResponse:
    return response_of(await client.finish(await client.compile(**fields)))


async def referrers(client: Client, ref: str) -> list[bundle_pb2.Blob]:
    response = await client.bundles.GetBundle(bundle_pb2.GetBundleRequest(ref=ref))
    return list(response.bundle.referrers)


async def test_graphs_are_attached_to_the_bundle_that_a_plain_compile_gives(home: Path) -> None:
    async with serve_compiler(home, runner=make_runner(home)) as (client, runner):
        plain = await compile_(client)
        assert await referrers(client, "tiny") == []
        debug = await compile_(client, debug=True)
        assert (debug.digest, debug.version, debug.cache) == (plain.digest, 1, pb.CACHE_RESULT_HIT)
        assert [(one.title, one.media_type) for one in await referrers(client, "tiny")] == [(TITLE, DEBUG_TYPE)]
        assert runner.built == [True, False], "nothing was built for it"


async def test_graphs_that_are_there_are_not_traced_again(home: Path) -> None:
    async with serve_compiler(home, runner=make_runner(home)) as (client, runner):
        await compile_(client, debug=True)
        assert runner.built == [True, False]
        await compile_(client, debug=True)
        await compile_(client)
        assert runner.built == [True, False]
        await compile_(client, debug=True, skip_cache_lookup=True)
        assert runner.built == [True, False, True, False], "unless nothing is to be looked up"
        assert len(await referrers(client, "tiny")) == 1, "equal bytes are one referrer"


async def test_a_compile_that_joins_a_plain_build_gets_its_graphs(home: Path) -> None:
    async with serve_compiler(home, runner=make_runner(home, may_build=False)) as (client, runner):
        plain = await client.compile(name="plain")
        await client.reach_build(plain)
        debug = await client.compile(name="debug", debug=True)
        await client.reach_build(debug)
        assert runner.built == [True], "one build for both"
        runner.is_open.set()
        assert response_of(await client.finish(plain)).digest == response_of(await client.finish(debug)).digest
        assert runner.built == [True, False]
        assert [one.title for one in await referrers(client, "debug")] == [TITLE]


async def test_a_plain_compile_does_not_wait_for_the_graphs_of_another(home: Path) -> None:
    runner = make_runner(home, may_build=False)
    runner.may_trace = False
    async with serve_compiler(home, "--max-builds", "2", runner=runner) as (client, _):
        debug = [await client.compile(name=name, debug=True) for name in ("debug", "same")]
        for one in debug:
            await client.reach_build(one)
        runner.is_open.set()
        for one in debug:
            progress = await client.reach(one, TRACING)
            assert progress.stage == pb.COMPILE_STAGE_PUBLISH
            assert (progress.executables_done, progress.executables_total) == (1, 2), "what the build counted stays"
        assert (await compile_(client, name="plain")).version == 1
        runner.may_trace = True
        digests = {response_of(await client.finish(one)).digest for one in debug}
        assert len(digests) == 1
        assert runner.built == [True, False], "graphs are traced once for both"


async def test_graphs_that_fail_fail_the_compile_and_not_the_build(home: Path) -> None:
    runner = make_runner(home)
    runner.may_trace = False
    async with serve_compiler(home, runner=runner) as (client, _):
        debug = await client.compile(debug=True)
        await client.reach(debug, TRACING)
        runner.error, runner.may_trace = BuildFailed("no graphs"), True
        failed = await client.finish(debug)
        refused = read_refusal(failed.error)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "BUILD_FAILED")
        runner.error = None
        assert (await compile_(client)).cache == pb.CACHE_RESULT_HIT
        assert len(runner.discarded) >= 2, "the directories of both jobs are given up"


async def test_cancelling_ends_the_tracing(home: Path) -> None:
    runner = make_runner(home)
    runner.may_trace = False
    async with serve_compiler(home, runner=runner) as (client, _):
        debug = await client.compile(debug=True)
        await client.reach(debug, TRACING)
        await client.cancel(debug.name)
        assert read_refusal((await client.finish(debug)).error).reason == "COMPILE_CANCELLED"
        runner.may_trace = True
        await compile_(client, debug=True)
        assert runner.built == [True, False, False]


async def test_lines_of_other_sources_do_not_count(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "store")
    digest = publish_sample(layout)
    assert not has_graphs(layout, digest, CODE)
    attach_graphs(layout.root, digest, "sha256:older")
    assert not has_graphs(layout, digest, CODE)
    attach_graphs(layout.root, digest)
    assert has_graphs(layout, digest, CODE)


def test_graphs_that_cannot_be_read_do_not_count(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "store")
    digest = publish_sample(layout)
    for data in (b"no gzip", b""):
        add_referrer(layout, digest, DEBUG_TYPE, DEBUG_TYPE, data, title=TITLE)
        assert not has_graphs(layout, digest, CODE)
