"""A bundle's ranks without a service: real processes, asked for logits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bundle.layout import Layout
from bundle.manifest import Executable, Manifest
from bundle.reader import open_bundle
from execution.rank_group import RankGroup
from execution.rank_nursery import RankNursery
from execution.step import Step

GREEDY = (1.0, 1.0, 0.0)


class Probe:
    """Rank processes of one bundle, driven step by step."""

    def __init__(self, manifest: Manifest, group: RankGroup, loop: asyncio.AbstractEventLoop) -> None:
        self._manifest = manifest
        self._group = group
        self._loop = loop
        self.num_slots = manifest.state.num_slots

    def prefill(self, ids: list[int], slot: int) -> torch.Tensor:
        """Logits f32 [V] after a prompt, in the smallest bucket that holds it."""
        executable = next(e for e in self._manifest.executables_of("context_encoding") if e.bucket[0] >= len(ids))
        bucket = executable.bucket[0]
        inputs = {
            "input_ids": ids + [0] * (bucket - len(ids)),
            "position_ids": list(range(bucket)),
            "seq_ids": [slot],
            "num_tokens": [len(ids)],
            "sampling_params": list(GREEDY),
            "rand": [0.0],
        }
        return self._run(executable, inputs)[0]

    def decode(self, token: int, position: int, slot: int) -> torch.Tensor:
        """Logits f32 [V] of one token, in the smallest bucket that reaches its position; other rows idle."""
        executable = next(e for e in self._manifest.executables_of("token_generation") if e.bucket[0] > position)
        rows = range(executable.batch_size)
        inputs = {
            "input_ids": [token if row == slot else 0 for row in rows],
            "position_ids": [position if row == slot else 0 for row in rows],
            "seq_ids": [slot if row == slot else self.num_slots for row in rows],
            "sampling_params": list(GREEDY) * len(rows),
            "rand": [0.0] * len(rows),
        }
        return self._run(executable, inputs)[slot]

    def _run(self, executable: Executable, inputs: dict[str, list[int] | list[float]]) -> torch.Tensor:
        step = Step(executable.tag, inputs, return_logits=True)
        result = self._loop.run_until_complete(self._group.run(step))
        assert result.logits is not None
        logits = torch.frombuffer(bytearray(result.logits), dtype=torch.float32).view(executable.batch_size, -1)
        row_tokens = logits.argmax(dim=1).tolist()
        assert result.tokens == row_tokens, "tokens and logits of a greedy step disagree"
        return logits


@contextmanager
def open_probe(store: Path, digest: str, nursery: RankNursery) -> Iterator[Probe]:
    """Starts the ranks of a bundle and ends them again."""
    layout = Layout(store)
    manifest = open_bundle(layout, digest).manifest
    with asyncio.Runner() as runner:
        group = runner.run(RankGroup.start(manifest, layout.blob_path, num_threads=1, nursery=nursery))
        try:
            runner.run(group.load())
            yield Probe(manifest, group, runner.get_loop())
        finally:
            runner.run(group.close())
