from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compiler_svc.lower.job import LoweringJob, LoweringOptions
from compiler_svc.lower.program import stage_job
from tests.lowering_cache import HOST, LOWERING_CACHE
from tests.ranks.toy import NUM_STATE, describe, export

StageToy = Callable[[str, int], LoweringJob]


@pytest.fixture
def stage_toy(tmp_path: Path) -> StageToy:
    """Stages a decode step of the toy model under a tag, at a level. Precompiled headers are the test's own."""
    cache_dir = tmp_path / "cache"
    cache_dir.mkdir()
    common_objects = LOWERING_CACHE / "objects"
    common_objects.mkdir(parents=True, exist_ok=True)
    (cache_dir / "objects").symlink_to(common_objects)
    program = export(describe("token_generation", "logits"), "logits")

    def stage(tag: str, level: int) -> LoweringJob:
        return stage_job(
            program,
            tag=tag,
            num_state=NUM_STATE,
            options=LoweringOptions(optimization_level=level, target=HOST),  # type: ignore[arg-type]
            directory=tmp_path / tag,
            cache_dir=cache_dir,
        )

    return stage
