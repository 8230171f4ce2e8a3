"""Launchers of ranks that tests look into."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from bundle.manifest import Manifest
from tests.ranks.fakes import BIAS, FakeRanks


@dataclass
class FakeLauncher:
    """Launches fake ranks; every group launched is kept for inspection."""

    manifest: Manifest
    bias: int = BIAS
    weights_ref: str = "fake:v1"
    has_weights: bool = True
    launched: list[FakeRanks] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    step_s: float = 0.0
    make_ranks: type[FakeRanks] = FakeRanks

    async def launch(self) -> FakeRanks:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        ranks = self.make_ranks(self.manifest, bias=self.bias)
        ranks.step_s = self.step_s
        self.launched.append(ranks)
        return ranks

    async def warm_up(self, ranks: FakeRanks) -> None:
        await ranks.warm_up()

    @property
    def ranks(self) -> FakeRanks:
        return self.launched[-1]
