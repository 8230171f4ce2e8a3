"""The gRPC code of each error class."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import grpc

from edge.errors import ClientStalled
from edge.status import BUNDLE_STATUSES, EDGE_STATUSES, StatusTable
from execution import device_errors as devices
from execution import errors as execution
from execution.text import errors as text
from runtime_svc import errors
from runtime_svc.bundles.errors import BlobExposed, BundleSourceCorrupt, BundleSourceRefused, CompilerTokenInvalid
from runtime_svc.captures.errors import CaptureUnwritable, TooManyCaptures
from runtime_svc.engine.errors import SessionBusy, SessionNotFound, TooManySessions
from runtime_svc.quarantine_errors import LoadQuarantined, PromptQuarantined, WeightsQuarantined
from targets import errors as targets

STATUS_TABLE: Final[StatusTable] = MappingProxyType(
    {
        **BUNDLE_STATUSES,
        # Of sequences that end before their calls do.
        ClientStalled: EDGE_STATUSES[ClientStalled],
        targets.IsaUnsupported: grpc.StatusCode.FAILED_PRECONDITION,
        targets.FormatUnknown: grpc.StatusCode.FAILED_PRECONDITION,
        targets.FormatInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        execution.ExecutableInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        execution.WeightsInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        execution.ExecutableUnknown: grpc.StatusCode.INTERNAL,
        execution.WeightsNotStaged: grpc.StatusCode.INTERNAL,
        execution.SlotUnknown: grpc.StatusCode.INTERNAL,
        execution.StepInvalid: grpc.StatusCode.INTERNAL,
        execution.StepFailed: grpc.StatusCode.INTERNAL,
        execution.WeightsAwaited: grpc.StatusCode.INTERNAL,
        execution.CollectivesMissing: grpc.StatusCode.FAILED_PRECONDITION,
        execution.TooManyRanks: grpc.StatusCode.FAILED_PRECONDITION,
        execution.RankFailed: grpc.StatusCode.INTERNAL,
        devices.NeuronLibraryMissing: grpc.StatusCode.FAILED_PRECONDITION,
        devices.DeviceUnsuitable: grpc.StatusCode.FAILED_PRECONDITION,
        devices.DeviceBusy: grpc.StatusCode.UNAVAILABLE,
        devices.DeviceMemoryShort: grpc.StatusCode.RESOURCE_EXHAUSTED,
        devices.DeviceCallFailed: grpc.StatusCode.INTERNAL,
        execution.RankLost: grpc.StatusCode.UNAVAILABLE,
        errors.RequestInvalid: grpc.StatusCode.INVALID_ARGUMENT,
        errors.FeatureNotServed: grpc.StatusCode.INVALID_ARGUMENT,
        text.TextInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        text.TextRefused: grpc.StatusCode.INVALID_ARGUMENT,
        text.TextLimitExceeded: grpc.StatusCode.FAILED_PRECONDITION,
        text.TextProcessLost: grpc.StatusCode.UNAVAILABLE,
        errors.PromptLimitExceeded: grpc.StatusCode.INVALID_ARGUMENT,
        errors.PromptTooLong: grpc.StatusCode.INVALID_ARGUMENT,
        errors.DeploymentNotFound: grpc.StatusCode.NOT_FOUND,
        errors.DeploymentNotReady: grpc.StatusCode.FAILED_PRECONDITION,
        errors.DeploymentExists: grpc.StatusCode.ALREADY_EXISTS,
        errors.DeploymentNotChosen: grpc.StatusCode.FAILED_PRECONDITION,
        errors.EngineNotServing: grpc.StatusCode.UNAVAILABLE,
        errors.MethodNotServed: grpc.StatusCode.UNIMPLEMENTED,
        errors.RequestIdInUse: grpc.StatusCode.ALREADY_EXISTS,
        errors.RequestsInFlight: grpc.StatusCode.FAILED_PRECONDITION,
        errors.QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.RequestAborted: grpc.StatusCode.ABORTED,
        SessionBusy: grpc.StatusCode.ABORTED,
        SessionNotFound: grpc.StatusCode.NOT_FOUND,
        TooManySessions: grpc.StatusCode.RESOURCE_EXHAUSTED,
        PromptQuarantined: grpc.StatusCode.FAILED_PRECONDITION,
        errors.NumericsInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
        errors.CoresUnavailable: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.MemoryUnavailable: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.ExecutablesMissing: grpc.StatusCode.FAILED_PRECONDITION,
        errors.WeightsMissing: grpc.StatusCode.FAILED_PRECONDITION,
        errors.AliasFollowed: grpc.StatusCode.FAILED_PRECONDITION,
        errors.GraphAbiMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.TokenizerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.LoadInProgress: grpc.StatusCode.ABORTED,
        LoadQuarantined: grpc.StatusCode.FAILED_PRECONDITION,
        WeightsQuarantined: grpc.StatusCode.FAILED_PRECONDITION,
        errors.BundleSourceUnavailable: grpc.StatusCode.UNAVAILABLE,
        BundleSourceCorrupt: grpc.StatusCode.DATA_LOSS,
        BundleSourceRefused: grpc.StatusCode.FAILED_PRECONDITION,
        CompilerTokenInvalid: grpc.StatusCode.FAILED_PRECONDITION,
        BlobExposed: grpc.StatusCode.FAILED_PRECONDITION,
        errors.BucketExceeded: grpc.StatusCode.INVALID_ARGUMENT,
        TooManyCaptures: grpc.StatusCode.RESOURCE_EXHAUSTED,
        CaptureUnwritable: grpc.StatusCode.FAILED_PRECONDITION,
        errors.EngineFailed: grpc.StatusCode.INTERNAL,
        errors.StateUnwritable: grpc.StatusCode.INTERNAL,
    }
)
