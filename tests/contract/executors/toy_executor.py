"""An executor from outside: its executables name a model of Python, which it calls with the bundle's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from bundle.manifest import Executable, Manifest
from execution.errors import ExecutableInvalid, StepFailed
from execution.executors.executor import Executor
from execution.executors.host import HostExecutor
from tests.ranks.toy import NUM_STATE, Picks, make_model


class ToyExecutable(msgspec.Struct):
    """What a file holds."""

    picks: Picks


def load_toy_executor(
    manifest: Manifest, rank: int, blob_path: Callable[[str], Path], on_loaded: Callable[[str], None]
) -> Executor:
    return HostExecutor(manifest, rank, blob_path, on_loaded, ToyProgram)


class ToyProgram:
    def __init__(self, executable: Executable, path: Path) -> None:
        try:
            content = msgspec.json.decode(path.read_bytes(), type=ToyExecutable)
        except (OSError, msgspec.DecodeError) as error:
            raise ExecutableInvalid(executable.tag, type(error).__name__) from error
        num_outputs = {"logits": 1, "tokens": 2}[content.picks]
        if (len(executable.state), len(executable.outputs)) != (NUM_STATE, num_outputs):
            raise ExecutableInvalid(
                executable.tag, f"it has {NUM_STATE} states and {num_outputs} outputs, the manifest has others"
            )
        self._tag = executable.tag
        self._model = make_model(0, content.picks)
        self._names = set(self._model.state_dict())
        self._constants: Mapping[str, Tensor] = {}
        self._staged: Mapping[str, Tensor] = {}

    def stage_constants(self, constants: Mapping[str, Tensor]) -> None:
        for name in sorted(self._names - constants.keys(), key=list(self._model.state_dict()).index):
            raise ExecutableInvalid(self._tag, f"constant {name} is bound to no weight")
        self._staged = constants

    def discard_staged(self) -> None:
        self._staged = {}

    def swap_constants(self) -> None:
        self._constants, self._staged = self._staged, self._constants

    @torch.no_grad()
    def run(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            results: tuple[Tensor, ...] = torch.func.functional_call(
                self._model, dict(self._constants), tuple(arguments)
            )
        except (RuntimeError, IndexError) as error:
            raise StepFailed(self._tag) from error
        return results

    def close(self) -> None:
        self._constants, self._staged = {}, {}
