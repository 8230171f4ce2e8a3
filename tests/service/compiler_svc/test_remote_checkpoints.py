"""Compiles of checkpoints that URLs name: fetched whole or not at all, in processes that end with their compile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from compiler_svc.planning.pool import PlanningPool, make_fetch_forkserver, make_forkserver
from compiler_svc.remote.fetching import fetch_outline, fetch_whole, remove_unfinished
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.random_weights import write_checkpoint
from tests.kill_points import repeat
from tests.processes import own_children
from tests.servers.refusals import expect, read_refusal, refusal
from tests.servers.running_compiler import Client, response_of, serve_compiler

#: Starts a compiler that accepts URLs below `remote`.
Serve = Callable[..., Any]


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "remote" / "tiny").parent


@pytest.fixture
def url(remote: Path) -> str:
    return f"file://{remote}/tiny"


@pytest.fixture
def serve(home: Path, remote: Path) -> Serve:
    return partial(serve_compiler, home, f"--model-url=file://{remote}")


def kept(home: Path) -> set[str]:
    """What the directory of fetched checkpoints holds, but for locks."""
    directory = home / "cache" / "checkpoints"
    return {path.name for path in directory.iterdir() if path.suffix != ".lock"}


async def outline(client: Client, home: Path, url: str) -> str:
    """The key of a checkpoint, which a plan makes the outline of."""
    await client.plan(model=url)
    (key,) = (path.name for path in (home / "cache/checkpoints/outlines").iterdir() if path.suffix != ".lock")
    return key


async def test_a_url_is_planned_and_compiled_as_a_path_is(serve: Serve, home: Path, remote: Path, url: str) -> None:
    async with serve() as (client, runner):
        key = await outline(client, home, url)
        assert kept(home) == {"outlines"}
        operation = await client.compile(model=url)
        await client.reach_build(operation)
        (job,) = runner.jobs
        assert job.spec.model == home / "cache" / "checkpoints" / key
        assert job.spec.source == url
        fetched, original = Checkpoint.open(job.spec.model), Checkpoint.open(remote / "tiny")
        assert fetched.files[0].read_bytes() == original.files[0].read_bytes()
        by_path = await client.compile(name="by-path")
        await client.reach_build(by_path)
        runner.is_open.set()
        assert response_of(await client.finish(operation)).version == 1
        # One build was enough: the files are the same.
        assert response_of(await client.finish(by_path)).digest == response_of(await client.finish(operation)).digest
        assert len(runner.jobs) == 1
    assert kept(home) == {"outlines", key}


async def test_urls_that_the_operator_does_not_accept(serve: Serve, home: Path, remote: Path) -> None:
    write_checkpoint(home / "secret")
    async with serve() as (client, _):
        for model in (f"file://{home}/secret", f"file://{remote}/../secret", "s3://bucket/tiny", "memory://tiny"):
            how = expect(await refusal(client.compile(model=model)), "PERMISSION_DENIED", "MODEL_URL_REFUSED")
            assert f"a URL below file://{remote}, or a path" in how.fields["model"]
        expect(await refusal(client.compile(model=f"file://{remote}/absent")), "NOT_FOUND", "CHECKPOINT_NOT_FOUND")
    async with serve_compiler(home) as (client, _):
        how = await refusal(client.compile(model=f"file://{remote}/tiny"))
        assert how.reason == "MODEL_URL_REFUSED"
        assert "accepted: a path;" in how.fields["model"]


async def test_credentials_reach_fetches_alone(home: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    with closing(make_forkserver()) as plans, closing(make_fetch_forkserver()) as fetches:
        pools = {"planning": PlanningPool(plans), "fetches": PlanningPool(fetches)}
        async with serve_compiler(home, "--model-url", f"file://{remote}", **pools) as (client, _):
            await outline(client, home, f"file://{remote}/tiny")
            children = {child.name(): child.environ() for child in own_children()}
    assert {name for name, found in children.items() if found.items() >= credentials.items()} == {"kiln-fetches"}
    assert "kiln-plans" in children


async def test_a_cancelled_compile_ends_its_fetch(serve: Serve, home: Path, remote: Path, url: str) -> None:
    async with serve() as (client, runner):
        key = await outline(client, home, url)
        with FileLock(home / "cache" / "checkpoints" / f".{key}.lock"):
            operation = await client.compile(model=url)
            await client.reach(operation, f"fetching {url}: 0 of {size_of(remote / 'tiny')} bytes (0 %)")
            # One that came later does not wait for it.
            other = await client.compile(name="other")
            await client.reach_build(other)
            await client.cancel(operation.name)
            await client.fail(operation, "CANCELLED", "COMPILE_CANCELLED")
            assert not [process for process in own_children() if process.name() == "kiln-fetch"]
        assert [job.spec.name for job in runner.jobs] == ["other"]
        assert kept(home) == {"outlines"}


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


async def test_a_fetch_that_takes_too_long(serve: Serve, home: Path, url: str) -> None:
    async with serve("--fetch-timeout", "1") as (client, _):
        key = await outline(client, home, url)
        with FileLock(home / "cache" / "checkpoints" / f".{key}.lock"):
            how = await client.fail(await client.compile(model=url), "UNAVAILABLE", "MODEL_FETCH_FAILED")
        assert "--fetch-timeout" in how.message


async def test_a_restarted_compiler_fetches_again(serve: Serve, home: Path, remote: Path, url: str) -> None:
    async with serve() as (client, _):
        key = await outline(client, home, url)
        lock = FileLock(home / "cache" / "checkpoints" / f".{key}.lock")
        lock.acquire()
        operation = await client.compile(model=url)
        await client.reach(operation, f"fetching {url}: 0 of {size_of(remote / 'tiny')} bytes (0 %)")
    lock.release()
    async with serve() as (client, runner):
        await client.reach_build(operation)
        assert [job.spec.model.name for job in runner.jobs] == [key]
    async with serve_compiler(home) as (client, _):
        # The operator accepts no URL any more.
        assert read_refusal((await client.finish(operation)).error).reason == "MODEL_URL_REFUSED"


def fetch_after_kill(directory: Path, remote: Path, url: str, key: str, *max_bytes: int) -> Path:
    """What a compiler does after it has started again: it sweeps, and fetches anew."""
    remove_unfinished(directory)
    assert not list(directory.glob(".*.part"))
    fetched = fetch_whole(url, key, (url,), directory, *max_bytes)
    assert_equal_files(fetched, remote / "tiny")
    return fetched


def assert_equal_files(directory: Path, original: Path) -> None:
    for file in directory.iterdir():
        assert file.read_bytes() == (original / file.name).read_bytes()


def test_a_killed_fetch_leaves_all_or_nothing(tmp_path: Path, remote: Path, url: str) -> None:
    before = tmp_path / "fetched" / "before"
    key = fetch_outline(url, (url,), tmp_path / "outline").name
    before.mkdir(parents=True)
    directories = repeat("tests.service.compiler_svc.fetch_until_killed", before, url, key)
    assert len(directories) > 20
    is_whole = [(directory / key).is_dir() for directory in directories]
    assert (is_whole[0], is_whole[-1], is_whole) == (False, True, sorted(is_whole))
    assert any(list(directory.glob(".*.part")) for directory in directories)
    for directory in directories:
        fetch_after_kill(directory, remote, url, key)
        shutil.rmtree(directory)


def test_a_removal_that_is_killed_leaves_all_or_nothing(tmp_path: Path, remote: Path, url: str) -> None:
    before = tmp_path / "fetched" / "before"
    other = f"file://{write_checkpoint(remote / 'other', seed=1)}"
    key, former = (fetch_outline(one, (one,), tmp_path / "outlines").name for one in (url, other))
    fetch_whole(other, former, (other,), before)
    max_bytes = size_of(remote / "tiny")
    directories = repeat("tests.service.compiler_svc.fetch_until_killed", before, url, key, str(max_bytes))
    steps = [(True, False), (False, False), (False, True)]
    there = [steps.index(((directory / former).is_dir(), (directory / key).is_dir())) for directory in directories]
    assert (sorted(there), set(there)) == (there, {0, 1, 2}), "the former one goes before the new one comes"
    for directory in directories:
        if (directory / former).is_dir():
            assert_equal_files(directory / former, remote / "other")
        fetched = fetch_after_kill(directory, remote, url, key, max_bytes)
        assert [path for path in directory.iterdir() if path.suffix != ".lock"] == [fetched]
        shutil.rmtree(directory)


async def test_a_build_keeps_its_checkpoint(serve: Serve, home: Path, remote: Path) -> None:
    write_checkpoint(remote / "other", seed=1)
    room = max(size_of(remote / name) for name in ("tiny", "other"))
    async with serve("--fetched-size", str(room)) as (client, runner):
        building = await client.compile(model=f"file://{remote}/tiny")
        await client.reach_build(building)
        other = await client.compile(name="other", model=f"file://{remote}/other")
        how = await client.fail(other, "RESOURCE_EXHAUSTED", "RESOURCES_SHORT")
        assert "room for fetched checkpoints" in how.message
        (job,) = runner.jobs
        assert job.spec.model.is_dir()
        runner.is_open.set()
        assert response_of(await client.finish(building)).version == 1
        assert await client.build(name="other", model=f"file://{remote}/other")
        assert not job.spec.model.exists()
    async with serve("--fetched-size", str(room - 1)) as (client, _):
        operation = await client.compile(name="third", model=f"file://{remote}/tiny")
        how = await client.fail(operation, "UNAVAILABLE", "MODEL_FETCH_FAILED")
        assert f"may have {room - 1} (--fetched-size" in how.message
