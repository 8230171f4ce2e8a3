"""A third executor, which no file of ours names: found through an entry point, also by rank processes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from compiler_svc.lower.job import LoweredExecutable
from execution.executors.executor import load_executor
from execution.ranks.group import RankGroup
from targets.errors import FormatUnknown
from tests.contract.executors.executor_suite import CTE, TKG, ExecutorSuite, Reference, prompt_inputs, token_inputs
from tests.contract.executors.outside import install
from tests.contract.executors.toy_executor import ToyExecutable
from tests.contract.executors.toy_format import TOY
from tests.contract.executors.write_suite import WriteSuite
from tests.ranks.toy import ToyBundle, make_bundle, make_model
from tests.ranks.toy_groups import step


def lower(tag: str, directory: Path) -> LoweredExecutable:
    path = directory / f"{tag}{TOY.suffix}"
    # The space makes the two files two blobs.
    path.write_bytes(msgspec.json.encode(ToyExecutable(picks="logits")) + b" " * len(tag))
    return LoweredExecutable(
        tag=tag,
        path=path,
        format=TOY.name,
        state_convention=TOY.state_convention,
        constants=tuple(make_model(0).state_dict()),
    )


@pytest.fixture
def uninstalled(tmp_path: Path) -> ToyBundle:
    """A bundle whose executables this host cannot run."""
    return make_bundle([lower(tag, tmp_path) for tag in (CTE, TKG)], "logits", tmp_path / "bundle")


@pytest.fixture
def toy_bundle(uninstalled: ToyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyBundle:
    site = tmp_path / "site"
    site.mkdir()
    install(site, {"toy": "tests.contract.executors.toy_format:TOY"})
    monkeypatch.syspath_prepend(site)
    return uninstalled


class TestToyExecutor(ExecutorSuite, WriteSuite):
    """The suite, on `toy_bundle`."""


async def test_rank_processes_find_it(toy_bundle: ToyBundle) -> None:
    reference = Reference(0)
    group = await RankGroup.start(toy_bundle.manifest, toy_bundle.blobs, num_threads=1)
    try:
        await group.load()
        await group.warm_up()
        await group.zero_state(None)
        for tag, inputs in ((CTE, prompt_inputs([5, 6, 7], 0)), (TKG, token_inputs([8, 9], [3, 0], [0, 1]))):
            result = await group.run(step(tag, inputs))
            assert result.tokens == reference.run(inputs).argmax(-1, keepdim=True).tolist()
    finally:
        await group.close()


async def test_without_the_distribution_nothing_is_started(uninstalled: ToyBundle) -> None:
    with pytest.raises(FormatUnknown, match=r"this host cannot run the bundle: executables\.format: got 'toy'"):
        await RankGroup.start(uninstalled.manifest, uninstalled.blobs, num_threads=1)
    with pytest.raises(FormatUnknown):
        load_executor(uninstalled.manifest, 0, uninstalled.blob_path)
