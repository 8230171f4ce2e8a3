"""A pass over a checkpoint's shards in children that kill themselves; see `tests.kill_points`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from bundle.manifest import WeightShard
from bundle.store.layout import Layout
from bundle.store.writer import BundleWriter
from compiler_svc.builds import weight_stage
from compiler_svc.builds.finished_shards import FOLDER, FinishedShards, digest_inputs
from compiler_svc.builds.progress import ProgressReport
from compiler_svc.builds.weight_stage import WeightStage
from compiler_svc.config import resolve_config
from compiler_svc.planning.build_plan import BuildPlan, plan_build
from compiler_svc.weights.checkpoint import Checkpoint
from tests.kill_points import LAYOUT_CALLS, CountedCalls

RANKS: Final = 4
#: So a pass writes two ranks, on any machine.
PROCESSORS: Final = 2
CALLS: Final[CountedCalls] = {**LAYOUT_CALLS, "compiler_svc.builds.finished_shards": None}


def plan(checkpoint: Checkpoint) -> BuildPlan:
    config = {"neuron_config": {"seq_len": 16, "max_context_length": 8, "tp_degree": RANKS}}
    return plan_build(checkpoint, resolve_config(config, checkpoint_dtype="float32").config.neuron_config, target="cpu")


def write(home: Path, model: Path, checkpoint_digest: str = "sha256:model") -> tuple[WeightShard, ...]:
    """Writes the shards into the store of `home` as the build in `home/jobs/build` does."""
    checkpoint = Checkpoint.open(model)
    planned = plan(checkpoint)
    finished = FinishedShards(
        home / "jobs" / "build" / FOLDER, digest_inputs(planned.weights, checkpoint, checkpoint_digest)
    )
    with Layout(home / "store").pinning() as layout:
        stage = WeightStage(planned, checkpoint, ProgressReport(lambda _news: None), finished)
        return stage.publish(layout, BundleWriter(layout))


def prepare(model: str) -> Callable[[Path], Callable[[], object]]:
    """Writes into copies of a home with a store and the directory of one build."""
    torch.set_num_threads(1)
    weight_stage.count_processors = lambda: PROCESSORS  # type: ignore[attr-defined]
    return lambda home: lambda: write(home, Path(model))
