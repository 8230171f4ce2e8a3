"""The stage that writes a quantized checkpoint: file by file into a directory beside its place, which it takes last."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bundle.digest import sha256_bytes
from bundle.host.reading import reading
from bundle.host.shortage import name_shortage
from compiler_svc.builds.finished_shards import FinishedFiles, digest_inputs
from compiler_svc.builds.job import BuildJob, CheckpointWritten, JobDirectory
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.errors import OutputExists, OutputRefused
from compiler_svc.planning.job_spec import QuantizeJobSpec
from compiler_svc.records import Stage
from compiler_svc.sharding.checkpoint_plan import INDEX_FILE, CheckpointPlan, plan_checkpoint, warn_of_plain
from compiler_svc.sharding.plan import WeightPlan
from compiler_svc.sharding.writer import CHECKPOINT_FILE, write_shards
from compiler_svc.weights.chat_templates import FOLDER
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.directory import CheckpointDirectory
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.inventory import set_surplus_aside, warn_of_surplus
from compiler_svc.weights.tensors import check_zeros

CONFIG_FILE: Final = "config.json"
#: Files of weights, whichever library's. The new checkpoint has its own.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_UNFINISHED: Final = ".part"


@dataclass(frozen=True, kw_only=True)
class CheckpointStage:
    """Writes one checkpoint. Files that an attempt has finished are not written again by the next one.

    Attributes:
        output: What the checkpoint's directory will be; it does not exist.
        roots: Directories that may contain the files of the plain checkpoint; none allows any.
        checkpoint_digest: Of the plain checkpoint.
    """

    plan: CheckpointPlan
    checkpoint: Checkpoint
    output: Path
    roots: Sequence[Path]
    checkpoint_digest: str
    directory: JobDirectory
    report: ProgressReport

    def write(self) -> None:
        """Writes all files, then gives the directory its name."""
        placed = self.directory.sharded / "placed"
        unfinished = self._unfinished()
        if self.output.exists():
            if placed.exists() and not unfinished.exists():
                # The attempt that ended behind the last step.
                return
            raise OutputExists(self.output.name)
        try:
            self.directory.begin_outside(unfinished)
        except OSError as error:
            accepted = "a directory that the compiler may write"
            raise name_shortage(error) or OutputRefused(self.output.name, str(error.strerror), accepted) from error
        self.report.enter(Stage.SHARD, "reading what an earlier attempt has written")
        self.report.update(total_bytes=self.plan.size_bytes)
        for name, file in self.plan.files.items():
            self._write_weights(unfinished / name, file)
        self._copy_others(unfinished)
        config = dict(self.checkpoint.whole_config) | dict(self.plan.config)
        _write_json(unfinished / CONFIG_FILE, config)
        if (index := self.plan.index) is not None:
            _write_json(unfinished / INDEX_FILE, index)
        self.report.enter(Stage.PUBLISH, "publishing")
        _sync(unfinished)
        placed.touch()
        _place(unfinished, self.output)

    def _unfinished(self) -> Path:
        """The directory of what is not finished: hidden, and for equal jobs the same."""
        job = sha256_bytes(os.fsencode(self.directory.sharded)).removeprefix("sha256:")[:12]
        return self.output.with_name(f".{self.output.name}.{job}")

    def _write_weights(self, path: Path, file: WeightPlan) -> None:
        finished = FinishedFiles(self.directory.sharded, digest_inputs(file, self.checkpoint, self.checkpoint_digest))
        if finished.has(path):
            self.report.add_sharded_bytes(file.shard_size_bytes)
            return
        self.report.enter(Stage.SHARD, f"writing {path.name}")
        part = path.with_name(f"{path.name}{_UNFINISHED}")
        with part.open("wb") as sink:
            write_shards(file, self.checkpoint, {0: sink}, form=CHECKPOINT_FILE, progress=self.report.add_sharded_bytes)
            sink.flush()
            os.fsync(sink.fileno())
        part.replace(path)
        finished.keep(path)

    def _copy_others(self, target: Path) -> None:
        """Copies all that is not weights: tokenizer, templates, licences, code."""
        source = CheckpointDirectory(self.checkpoint.path, tuple(root.resolve() for root in self.roots))
        lasting = "files that can be read, and stay as they are"
        with reading(lambda detail: CheckpointInvalid(source.path, ".", detail, lasting)):
            folders = [""] if not (source.path / FOLDER).is_dir() else ["", FOLDER]
            for folder in folders:
                (target / folder).mkdir(exist_ok=True)
                for name in source.list_names(folder):
                    inside = f"{folder}/{name}" if folder else name
                    if not name.startswith(".") and not name.endswith(_WEIGHTS) and source.has(inside):
                        shutil.copyfile(source.small_file(inside), target / inside)


def quantize_checkpoint(
    job: BuildJob, spec: QuantizeJobSpec, directory: JobDirectory, report: ProgressReport
) -> CheckpointWritten:
    """Writes the checkpoint of a job."""
    checkpoint = set_surplus_aside(Checkpoint.open(spec.model, roots=spec.model_roots))
    check_zeros(checkpoint)
    plan = plan_checkpoint(checkpoint, spec.dtype, spec.layout, spec.modules_to_not_convert)
    CheckpointStage(
        plan=plan,
        checkpoint=checkpoint,
        output=spec.output,
        roots=spec.model_roots,
        checkpoint_digest=job.checkpoint_digest,
        directory=directory,
        report=report,
    ).write()
    # Of pickles, only those who open them know the tensors.
    warnings = (*warn_of_surplus(checkpoint), *warn_of_plain(plan.plain)) if checkpoint.is_pickled else ()
    return CheckpointWritten(size_bytes=plan.size_bytes, warnings=warnings)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _place(unfinished: Path, output: Path) -> None:
    try:
        unfinished.rename(output)
    except OSError as error:
        if output.exists():
            raise OutputExists(output.name) from error
        raise
