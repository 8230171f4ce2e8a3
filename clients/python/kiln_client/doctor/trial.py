"""Compiles the model of one layer and runs it, by services that this process starts in a directory of their own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

from kiln.compiler.v1.compiler_pb2 import CompileMetadata, CompileStage

from kiln_client.compile_requests import compile_request
from kiln_client.compiler import AsyncCompiler
from kiln_client.doctor.one_layer import GOLDEN, INFERENCE_CONFIG, PROMPT, find_deviation, write_checkpoint
from kiln_client.doctor.probe import Finding, OnProgress
from kiln_client.enums import enum_name
from kiln_client.errors import KilnError
from kiln_client.runtime import AsyncRuntime
from kiln_client.stack.service_process import Service, ServiceProcess, reachable_address
from kiln_client.stack.stack import COMPILER, RUNTIME

_ADDRESS: Final = "127.0.0.1:0"
_READY_S: Final = 120.0
_STOP_S: Final = 30.0
_NAME: Final = "one-layer"
CPU: Final = "cpu"

#: Largest deviation of a logit, as a share of the largest one. The units of a NeuronCore approximate functions such as
#: exp; how far has not been measured.
TOLERANCE: Final = 1e-4
DEVICE_TOLERANCE: Final = 1e-2

#: The check that says more of an error, by the error's reason.
_CHECKS_BY_REASON: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NEURON_TOOLCHAIN_MISSING": "packages",
        "TOOLCHAIN_MISSING": "tools",
        "NEURON_LIBRARY_MISSING": "library",
        "DEVICE_BUSY": "cores",
        "DEVICE_UNSUITABLE": "cores",
        "CORES_UNAVAILABLE": "cores",
    }
)


class OneLayerTrial:
    """The two checks that need services. They start when a check needs them, and end with this."""

    def __init__(self, directory: Path, target: str, neuron_python: str | None) -> None:
        """Starts nothing yet.

        `directory` is empty, and takes all that the services write. `neuron_python` is a Python with Neuron's packages;
        None takes the compiler's default.
        """
        self.directory = directory
        self._target = target
        self._neuron_python = neuron_python
        self._services = AsyncExitStack()
        self._compiler_address = ""
        self._version = 0

    async def compile(self, on_progress: OnProgress) -> Finding:
        """Compiles the model."""
        try:
            await self._start_compiler(on_progress)
            request = compile_request(_NAME, _NAME, dict(INFERENCE_CONFIG), target=self._target, optimization_level=1)

            def report(progress: CompileMetadata) -> None:
                on_progress(f"{enum_name(CompileStage.DESCRIPTOR, progress.stage)} {progress.message}".strip())

            async with AsyncCompiler(self._compiler_address, token="") as compiler:
                response = await compiler.compile(request, on_progress=report)
        except KilnError as error:
            return self._explain(error, COMPILER.name)
        self._version = response.version
        tags = [one.tag for one in response.executables]
        return Finding(status="ok", summary=f"made {' and '.join(tags)}", details={"executables": tags})

    async def step(self, on_progress: OnProgress, core: int) -> Finding:
        """Loads what `compile` made onto a core, and compares the logits of a prompt and of a token with the golden."""
        try:
            on_progress("starting the runtime")
            address = await self._start_runtime(core)
            async with AsyncRuntime(address, token="") as runtime:
                on_progress(f"loading onto core {core}")
                await runtime.load_bundle(f"{_NAME}:v{self._version}", _NAME, cores=[core])
                on_progress("running")
                completion = await runtime.complete(
                    _NAME, [*PROMPT], max_new_tokens=len(GOLDEN), temperature=0.0, ignore_eos=True, logits=True
                )
        except KilnError as error:
            return self._explain(error, RUNTIME.name)
        return compare([token.logits for token in completion.tokens], self._target)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._services.aclose()

    async def _start_compiler(self, on_progress: OnProgress) -> None:
        on_progress("starting the compiler")
        await asyncio.to_thread(write_checkpoint, self.directory / "models" / _NAME)
        options = self._place({"--store": "store", "--cache": "compiler-cache", "--model-root": "models"})
        options += ["--database", f"sqlite:///{self.directory / 'kiln.db'}"]
        # What cores compute is the other check's business.
        options += ["--golden-cores", "none"]
        if self._neuron_python is not None:
            options += ["--neuron-python", self._neuron_python]
        self._compiler_address = await self._start(COMPILER, options)

    async def _start_runtime(self, core: int) -> str:
        options = self._place({"--bundle-store": "store", "--cache": "runtime-cache", "--state": "state"})
        target = [] if self._target == CPU else ["--target", self._target]
        compiler = ["--compiler", self._compiler_address]
        return await self._start(RUNTIME, [*options, *target, *compiler, "--cores", str(core + 1)])

    async def _start(self, service: Service, options: Sequence[str]) -> str:
        process = await ServiceProcess.start(service, ["--address", _ADDRESS, *options], self._log_path(service.name))
        self._services.push_async_callback(process.stop, _STOP_S)
        return reachable_address(await process.ready(_READY_S, None))

    def _place(self, folders: Mapping[str, str]) -> list[str]:
        return [word for option, name in folders.items() for word in (option, str(self.directory / name))]

    def _log_path(self, service: str) -> Path:
        return self.directory / f"{service}.log"

    def _explain(self, error: KilnError, service: str) -> Finding:
        check = _CHECKS_BY_REASON.get(error.reason)
        log = self._log_path(service)
        advice = f"kiln doctor --target {self._target} --check {check}" if check else f"less {log}"
        details = {"reason": error.reason, "log": str(log)}
        return Finding(status="failed", summary=f"{error.reason}: {error.message}", advice=advice, details=details)


def compare(logits: Sequence[Sequence[float]], target: str) -> Finding:
    """Compares logits, float32 [tokens, vocabulary], that the target has computed with the golden ones."""
    deviation = find_deviation(logits)
    tolerance = TOLERANCE if target == CPU else DEVICE_TOLERANCE
    is_close = deviation <= tolerance
    summary = f"logits within {deviation:.1e} of transformers' largest, {tolerance:.0e} allowed"
    if not is_close:
        summary = f"logits differ by {deviation:.1e} of transformers' largest, {tolerance:.0e} allowed"
    # JSON has no infinity.
    details = {"deviation": deviation if math.isfinite(deviation) else None, "tolerance": tolerance}
    advice = "" if is_close else "report it, with the output of `kiln doctor --json`: this host computes other numbers"
    return Finding(status="ok" if is_close else "failed", summary=summary, advice=advice, details=details)
