"""Bundles of the matrix, compiled by the service and loaded on the runtime, one after another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc
from kiln.compiler.v1 import compiler_pb2, compiler_pb2_grpc
from kiln.runtime.v1 import runtime_pb2, runtime_pb2_grpc

from tests.parity.cases import Case
from tests.parity.reference import Reference, write_checkpoint
from tests.servers.stack import Stack

LEVELS = {
    0: compiler_pb2.OPTIMIZATION_LEVEL_O0,
    1: compiler_pb2.OPTIMIZATION_LEVEL_O1,
    2: compiler_pb2.OPTIMIZATION_LEVEL_O2,
}


class Bundles:
    """Compiles cases ahead of the tests that need them, as far as the service's queue takes them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._ahead: list[Case] = []
        self._operations: dict[Case, str] = {}
        self._references: dict[str, Reference] = {}
        channel = grpc.insecure_channel(stack.compiler)
        self._compiler = compiler_pb2_grpc.CompilerServiceStub(channel)
        self._long_running = operations_pb2_grpc.OperationsStub(channel)
        self._runtime = runtime_pb2_grpc.RuntimeServiceStub(grpc.insecure_channel(stack.runtime))

    def close(self) -> None:
        """Cancels what was compiled for tests that did not run."""
        for name in self._operations.values():
            self._long_running.CancelOperation(operations_pb2.CancelOperationRequest(name=name))
            self._long_running.WaitOperation(operations_pb2.WaitOperationRequest(name=name))

    def expect(self, cases: list[Case]) -> None:
        """Says which bundles will be asked for, in this order."""
        self._ahead = cases

    def reference(self, geometry: str) -> Reference:
        """The model in transformers; its checkpoint is written once."""
        if geometry not in self._references:
            self._references[geometry] = write_checkpoint(self._stack.new_model(geometry), geometry)
        return self._references[geometry]

    def digest(self, case: Case) -> str:
        """Digest of a case's bundle, when it is compiled."""
        self._submit_ahead(case)
        while True:
            request = operations_pb2.WaitOperationRequest(name=self._operations[case])
            operation = self._long_running.WaitOperation(request)
            if operation.done:
                break
            time.sleep(0.05)
        self._submit_ahead(None)
        assert not operation.HasField("error"), operation.error
        response = compiler_pb2.CompileResponse()
        assert operation.response.Unpack(response)
        return response.digest

    @contextmanager
    def deployed(self, case: Case) -> Iterator[str]:
        """Loads a case's bundle; gives the deployment id."""
        ref = self.digest(case)
        events = list(self._runtime.LoadBundle(runtime_pb2.LoadBundleRequest(ref=ref, deployment_id=case.name)))
        assert events[-1].deployment.state == runtime_pb2.Deployment.STATE_READY
        try:
            yield case.name
        finally:
            self._runtime.UnloadBundle(runtime_pb2.UnloadBundleRequest(deployment_id=case.name))

    def _submit_ahead(self, needed: Case | None) -> None:
        """Submits the needed case, and others until the queue is full."""
        first = [] if needed is None or needed in self._operations else [needed]
        for case in first + [case for case in self._ahead if case not in first]:
            try:
                self._operations[case] = self._submit(case)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                if case == needed:
                    time.sleep(1)
                    self._submit_ahead(needed)
                return
            if case in self._ahead:
                self._ahead.remove(case)

    def _submit(self, case: Case) -> str:
        request = compiler_pb2.CompileRequest(
            name=case.name,
            model=str(self.reference(case.geometry).path),
            config_json=json.dumps(case.config),
            optimization_level=LEVELS[case.level],
        )
        return self._compiler.Compile(request).name
