"""The gRPC code of every error that this service can answer with."""

from __future__ import annotations

from typing import Final

import grpc
from google.rpc import status_pb2

from compiler_svc import errors
from compiler_svc.bundles import errors as bundle_errors
from compiler_svc.golden.errors import GoldenMismatch
from compiler_svc.lower.errors import (
    LoweringError,
    LoweringMemoryExceeded,
    LoweringTimedOut,
    NeuronGraphRefused,
    NeuronMemoryExceeded,
)
from compiler_svc.models.errors import ModelError
from compiler_svc.planning import errors as planning_errors
from compiler_svc.remote import errors as remote_errors
from compiler_svc.sharding.errors import ShardingNotServed
from compiler_svc.weights.errors import CheckpointError, CheckpointNotFound
from edge.status import BUNDLE_STATUSES, StatusTable, status_from_error
from execution.errors import ExecutionError
from execution.failure import Failure
from execution.text.errors import TextError, TextProcessLost
from targets.errors import IsaUnknown, TargetError

STATUS_TABLE: Final[StatusTable] = {
    **BUNDLE_STATUSES,
    errors.CompilerError: grpc.StatusCode.INTERNAL,
    errors.ConfigInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.FeatureNotServed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NameInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NameOwned: grpc.StatusCode.PERMISSION_DENIED,
    errors.OwnerInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PathOutsideModelRoots: grpc.StatusCode.PERMISSION_DENIED,
    errors.RequestIdReused: grpc.StatusCode.ALREADY_EXISTS,
    errors.CompileQueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OperationNotFound: grpc.StatusCode.NOT_FOUND,
    errors.OperationNotDone: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PageTokenInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.FilterInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OffsetInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AliasInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TagAmbiguous: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AliasNotFound: grpc.StatusCode.NOT_FOUND,
    errors.AliasChanged: grpc.StatusCode.ABORTED,
    errors.AliasIncompatible: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BundleInUse: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CompileCancelled: grpc.StatusCode.CANCELLED,
    errors.CompilerRestarted: grpc.StatusCode.UNAVAILABLE,
    errors.BuildFailed: grpc.StatusCode.INTERNAL,
    errors.BuildStalled: grpc.StatusCode.UNAVAILABLE,
    errors.GraphAbiMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ExecutablesMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TooManyWatchers: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyStreams: grpc.StatusCode.RESOURCE_EXHAUSTED,
    bundle_errors.LeaseInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    bundle_errors.CacheAgeInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    bundle_errors.PathOutsideImportRoots: grpc.StatusCode.PERMISSION_DENIED,
    bundle_errors.SourceLayoutInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    planning_errors.PlanTimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    planning_errors.PlanMemoryExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    planning_errors.PlanFailed: grpc.StatusCode.INTERNAL,
    planning_errors.TooManyPlans: grpc.StatusCode.RESOURCE_EXHAUSTED,
    remote_errors.ModelUrlRefused: grpc.StatusCode.PERMISSION_DENIED,
    remote_errors.ModelUrlUnsupported: grpc.StatusCode.INVALID_ARGUMENT,
    remote_errors.ModelFetchFailed: grpc.StatusCode.UNAVAILABLE,
    CheckpointError: grpc.StatusCode.INVALID_ARGUMENT,
    CheckpointNotFound: grpc.StatusCode.NOT_FOUND,
    ModelError: grpc.StatusCode.INVALID_ARGUMENT,
    ShardingNotServed: grpc.StatusCode.INVALID_ARGUMENT,
    GoldenMismatch: grpc.StatusCode.INTERNAL,
    LoweringError: grpc.StatusCode.INTERNAL,
    NeuronGraphRefused: grpc.StatusCode.FAILED_PRECONDITION,
    NeuronMemoryExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LoweringMemoryExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LoweringTimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    TargetError: grpc.StatusCode.FAILED_PRECONDITION,
    IsaUnknown: grpc.StatusCode.INVALID_ARGUMENT,
    ExecutionError: grpc.StatusCode.INTERNAL,
    TextError: grpc.StatusCode.INTERNAL,
    TextProcessLost: grpc.StatusCode.UNAVAILABLE,
}


def status_from_failure(failure: Failure) -> status_pb2.Status:
    """Renders a recorded error."""
    return status_from_error(failure.to_error(), STATUS_TABLE)
