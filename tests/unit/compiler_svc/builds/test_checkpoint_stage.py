"""Writing a quantized checkpoint: what an attempt that ends leaves, and what the next one does with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from compiler_svc.builds.checkpoint_stage import CheckpointStage
from compiler_svc.builds.job import JobDirectory
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import OutputExists, OutputRefused
from compiler_svc.records import BuildNews, Progress, Stage
from compiler_svc.sharding.checkpoint_plan import plan_checkpoint
from compiler_svc.weights.checkpoint import Checkpoint
from tests.checkpoints.random_weights import random_tensors, write_checkpoint

THIRD = "model-00003-of-00005.safetensors"


class Attempt:
    """One attempt to write a quantized checkpoint of five files; it may end when it begins one of them."""

    def __init__(self, home: Path, *, ends_at: str = "") -> None:
        self.progress: list[Progress] = []
        self._ends_at = f"writing {ends_at}"
        checkpoint = Checkpoint.open(home / "models" / "tiny")
        self.directory = JobDirectory(home / "jobs" / "quantize")
        self.directory.begin()
        self.output = home / "models" / "small"
        self._stage = CheckpointStage(
            plan=plan_checkpoint(checkpoint, "int8", "compressed-tensors", max_file_bytes=7_000),
            checkpoint=checkpoint,
            output=self.output,
            roots=(),
            checkpoint_digest="sha256:plain",
            directory=self.directory,
            report=ProgressReport(self._note),
        )

    def _note(self, news: BuildNews) -> None:
        assert news.progress is not None
        self.progress.append(news.progress)
        if news.progress.message == self._ends_at:
            raise InterruptedError

    def write(self) -> list[str]:
        """Writes it; returns the files that the attempt began."""
        self._stage.write()
        told = dict.fromkeys(one.message for one in self.progress)
        return [one.removeprefix("writing ") for one in told if one.startswith("writing ")]

    def unfinished(self) -> Path:
        (path,) = self.output.parent.glob(".small.*")
        return path


def interrupt(home: Path) -> Path:
    """The directory that an attempt leaves which ends with its third file."""
    attempt = Attempt(home, ends_at=THIRD)
    with pytest.raises(InterruptedError):
        attempt.write()
    assert not attempt.output.exists()
    unfinished = attempt.unfinished()
    assert not (unfinished / "config.json").exists(), "no checkpoint until it is whole"
    return unfinished


def list_files(path: Path) -> dict[str, int]:
    return {one.name: one.stat().st_ino for one in path.glob("*.safetensors")}


def test_the_next_attempt_goes_on(home: Path) -> None:
    unfinished = interrupt(home)
    before = list_files(unfinished)
    assert len(before) == 2
    (unfinished / f"{THIRD}.part").write_bytes(b"half of it")
    second = Attempt(home)
    assert second.write() == [f"model-{number:05}-of-00005.safetensors" for number in (3, 4, 5)]
    assert before.items() <= list_files(second.output).items()
    assert second.progress[-1].sharded_bytes >= second.progress[-1].total_bytes > 0
    assert second.progress[-1].stage is Stage.PUBLISH
    names = {path.name for path in second.output.iterdir()}
    others = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert names == list_files(second.output).keys() | others
    assert {path.name for path in second.output.parent.iterdir()} == {"tiny", "small"}
    written = Checkpoint.open(second.output)
    assert len(written.packed) == 14
    for file in written.files:
        with safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_files_that_are_no_longer_right_are_written_again(home: Path) -> None:
    unfinished = interrupt(home)
    first = sorted(unfinished.glob("*.safetensors"))[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second = Attempt(home)
    assert second.write()[0] == first.name
    assert (second.output / first.name).read_bytes() != bytes(data)


def test_files_of_another_checkpoint_are_written_again(home: Path) -> None:
    interrupt(home)
    write_checkpoint(home / "other", seed=1)
    (home / "other" / "model.safetensors").replace(home / "models" / "tiny" / "model.safetensors")
    assert len(Attempt(home).write()) == 5


def test_an_attempt_that_ended_behind_the_last_step_has_written_it(home: Path) -> None:
    first = Attempt(home)
    first.write()
    files = list_files(first.output)
    assert Attempt(home).write() == []
    assert list_files(first.output) == files


def test_a_directory_of_others_stays(home: Path) -> None:
    attempt = Attempt(home)
    attempt.output.mkdir()
    with pytest.raises(OutputExists) as caught:
        attempt.write()
    assert "output: got small, which exists" in str(caught.value)
    assert list(attempt.output.iterdir()) == []


def test_a_place_that_is_gone_is_named(home: Path) -> None:
    attempt = Attempt(home)
    (home / "models").rename(home / "moved")
    with pytest.raises(OutputRefused) as caught:
        attempt.write()
    assert "output: got small (No such file or directory)" in str(caught.value)


@pytest.mark.parametrize("end", [JobDirectory.free, JobDirectory.remove])
def test_what_is_unfinished_goes_with_its_job(home: Path, end: object) -> None:
    unfinished = interrupt(home)
    assert callable(end)
    end(JobDirectory(home / "jobs" / "quantize"))
    assert not unfinished.exists()
    assert (home / "models" / "tiny").exists()


def test_the_configuration_says_how_it_is_quantized(home: Path) -> None:
    Attempt(home).write()
    before = json.loads((home / "models" / "tiny" / "config.json").read_text())
    after = json.loads((home / "models" / "small" / "config.json").read_text())
    said = after.pop("quantization_config")
    assert after == before
    assert (said["format"], said["ignore"]) == ("int-quantized", ["lm_head"])
    assert len(random_tensors(before, 0)) == len(Checkpoint.open(home / "models" / "small").tensors)
