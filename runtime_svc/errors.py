"""The errors of the runtime service.

KilnError
└── RuntimeServiceError
    ├── RequestInvalid              values that no deployment would take
    ├── FeatureNotServed            a valid request for a feature that this deployment lacks
    ├── PromptTooLong
    ├── PromptLimitExceeded         a prompt that the text process does not end with
    ├── DeploymentNotFound
    ├── DeploymentNotReady
    ├── DeploymentExists            an id that another bundle holds
    ├── DeploymentNotChosen         a call that names no deployment, while not exactly one serves
    ├── EngineNotServing            vLLM's engine API, while it has no deployment to speak for
    ├── MethodNotServed             a method of an API of others that Kiln does not serve
    ├── RequestIdInUse
    ├── RequestsInFlight            a call with policy REFUSE while requests run
    ├── QueueFull
    ├── RequestAborted
    ├── DeadlineExceeded
    ├── PromptQuarantined           see runtime_svc.quarantine_errors
    ├── SessionBusy                 see runtime_svc.engine.errors
    ├── SessionNotFound             see runtime_svc.engine.errors
    ├── TooManySessions             see runtime_svc.engine.errors
    ├── NumericsInvalid             a request whose logits are NaN or infinite
    ├── ShuttingDown
    ├── CoresUnavailable
    ├── MemoryUnavailable
    ├── ExecutablesMissing          a bundle with weights only, to be loaded
    ├── WeightsMissing              a bundle with executables only, for its weights
    ├── AliasFollowed               LoadWeights for a deployment that follows an alias
    ├── GraphAbiMismatch
    ├── TokenizerMismatch
    ├── LoadInProgress
    ├── LoadQuarantined             see runtime_svc.quarantine_errors
    ├── WeightsQuarantined          see runtime_svc.quarantine_errors
    ├── BundleSourceUnavailable
    ├── BundleSourceCorrupt         see runtime_svc.bundles.errors
    ├── BundleSourceRefused         see runtime_svc.bundles.errors
    ├── CompilerTokenInvalid        see runtime_svc.bundles.errors
    ├── BlobExposed                 see runtime_svc.bundles.errors
    ├── BucketExceeded              more tokens, positions or rows than any executable has
    ├── TooManyCaptures             see runtime_svc.captures.errors
    ├── CaptureUnwritable           see runtime_svc.captures.errors
    ├── EngineFailed                an engine that a bug of Kiln stopped
    └── StateUnwritable             a disk that does not take the records of deployments
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bundle.errors import FieldViolation, KilnError


class RuntimeServiceError(KilnError):
    """Root of the runtime service's errors."""


class RequestInvalid(RuntimeServiceError):
    """Values that no deployment would take."""

    reason = "REQUEST_INVALID"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__("; ".join(map(str, violations)), violations=tuple(violations))


class FeatureNotServed(RuntimeServiceError):
    """A valid request for a feature that this deployment lacks."""

    reason = "FEATURE_NOT_SERVED"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__(
            "not served: " + "; ".join(map(str, violations)),
            violations=tuple(violations),
            fields=",".join(violation.field for violation in violations),
        )


class PromptTooLong(RuntimeServiceError):
    """A prompt that leaves the executables no room."""

    reason = "PROMPT_TOO_LONG"

    def __init__(self, field: str, size: int, limit: int, unit: str = "tokens") -> None:
        self.field, self.size, self.limit, self.unit = field, size, limit, unit
        violation = FieldViolation(field, f"{size} {unit}", f"at most {limit} {unit}")
        super().__init__(
            f"the prompt is too long: {violation}",
            violations=(violation,),
            field=field,
            **{f"num_{unit}": size, f"max_{unit}": limit},
        )


class PromptLimitExceeded(RuntimeServiceError):
    """A prompt whose chat template or tokenizer has reached a limit of the deployment's text process."""

    reason = "PROMPT_LIMIT_EXCEEDED"

    def __init__(self, field: str, limit: str) -> None:
        self.field, self.limit = field, limit
        accepted = f"what the bundle's tokenizer and chat template convert with {limit}"
        violation = FieldViolation(field, f"needs more than {limit}", accepted)
        super().__init__(str(violation), violations=(violation,), field=field, limit=limit)


class DeploymentNotFound(RuntimeServiceError):
    """An id that names no deployment."""

    reason = "DEPLOYMENT_NOT_FOUND"

    def __init__(self, deployment_id: str) -> None:
        super().__init__(f"no deployment {deployment_id!r}", deployment_id=deployment_id)


class DeploymentNotReady(RuntimeServiceError):
    """A deployment that is being loaded or unloaded, awaits weights, is recovering, or has failed."""

    reason = "DEPLOYMENT_NOT_READY"

    def __init__(self, deployment_id: str, state: str, detail: str = "") -> None:
        message = f"deployment {deployment_id!r} is {state}" + (f": {detail}" if detail else "")
        super().__init__(message, deployment_id=deployment_id, state=state, detail=detail)


class DeploymentExists(RuntimeServiceError):
    """An id that another bundle, or the same one with other options, holds."""

    reason = "DEPLOYMENT_EXISTS"

    def __init__(self, deployment_id: str, bundle_digest: str, detail: str = "") -> None:
        super().__init__(
            f"deployment {deployment_id!r} exists already with bundle {bundle_digest}"
            + (detail and f" and {detail}")
            + f"; LoadWeights (`kiln load-weights {deployment_id} REF`) replaces its weights, UnloadBundle "
            f"(`kiln unload {deployment_id}`) ends it",
            deployment_id=deployment_id,
            bundle_digest=bundle_digest,
        )


class DeploymentNotChosen(RuntimeServiceError):
    """A call that names no deployment, while not exactly one serves."""

    reason = "DEPLOYMENT_NOT_CHOSEN"

    def __init__(self, serving_ids: Sequence[str]) -> None:
        serving = ", ".join(serving_ids)
        detail = f"several serve: {serving}; --engine-deployment of the runtime names one" if serving else "none serves"
        super().__init__(f"this API names no deployment, and {detail}", deployment_ids=serving)


class EngineNotServing(RuntimeServiceError):
    """A Generate of vLLM's engine API while the runtime has no deployment that could answer: another runtime may."""

    reason = "ENGINE_NOT_SERVING"

    def __init__(self, detail: str) -> None:
        super().__init__(f"vLLM's engine API does not serve now: {detail}", detail=detail)


class MethodNotServed(RuntimeServiceError):
    """A method of an API of others that Kiln does not serve."""

    reason = "METHOD_NOT_SERVED"

    def __init__(self, method: str, detail: str) -> None:
        super().__init__(f"{method} is not served: {detail}", method=method, detail=detail)


class RequestIdInUse(RuntimeServiceError):
    """A request id that a running request has."""

    reason = "REQUEST_ID_IN_USE"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is in use", request_id=request_id)


class RequestsInFlight(RuntimeServiceError):
    """A call with policy REFUSE while requests run."""

    reason = "REQUESTS_IN_FLIGHT"

    def __init__(self, num_requests: int) -> None:
        super().__init__(f"{num_requests} requests are in flight", num_requests=num_requests)


class QueueFull(RuntimeServiceError):
    """A queue that holds as many requests as it may."""

    reason = "QUEUE_FULL"

    def __init__(self, capacity: int, retry_after_s: float) -> None:
        super().__init__(f"{capacity} requests wait already", retry_after_s=retry_after_s, capacity=capacity)


class RequestAborted(RuntimeServiceError):
    """A request that another call ended."""

    reason = "REQUEST_ABORTED"

    def __init__(self, request_id: str, cause: str) -> None:
        super().__init__(f"request {request_id!r} was ended by {cause}", request_id=request_id, cause=cause)


class DeadlineExceeded(RuntimeServiceError):
    """A request that its call's deadline ended."""

    reason = "DEADLINE_EXCEEDED"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} met its deadline", request_id=request_id)


class NumericsInvalid(RuntimeServiceError):
    """A request whose logits are NaN or infinite: its prompt makes the model's numbers overflow, or weights are NaN."""

    reason = "NUMERICS_INVALID"

    def __init__(self, request_id: str, num_tokens: int) -> None:
        super().__init__(
            f"the logits of request {request_id!r} are NaN or infinite after {num_tokens} tokens, prompt included",
            request_id=request_id,
            num_tokens=num_tokens,
        )


class ShuttingDown(RuntimeServiceError):
    """A request that the server refuses or ends because it shuts down."""

    reason = "SHUTTING_DOWN"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class CoresUnavailable(RuntimeServiceError):
    """Cores that the server does not have, or that another deployment holds.

    Attributes:
        is_lasting: Whether they would be unavailable without other deployments, too.
    """

    reason = "CORES_UNAVAILABLE"

    def __init__(
        self, wanted: str, free: Sequence[int], holders: Mapping[str, Sequence[int]], *, is_lasting: bool = False
    ) -> None:
        self.is_lasting = is_lasting
        available = _join(free) or "none"
        held = "; ".join(f"{holder} holds {_join(cores)}" for holder, cores in holders.items()) or "none is held"
        super().__init__(
            f"{wanted}; free cores: {available}; {held}. Unload a deployment, or start the runtime with more --cores",
            wanted=wanted,
            free_cores=available,
            held=held,
        )


def _join(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))


class MemoryUnavailable(RuntimeServiceError):
    """A deployment that needs more memory than is free.

    Attributes:
        is_lasting: Whether it needs more than there is.
    """

    reason = "MEMORY_UNAVAILABLE"

    def __init__(self, needed_bytes: int, free_bytes: int, total_bytes: int, *, where: str = "") -> None:
        self.is_lasting = needed_bytes > total_bytes
        missing_bytes = needed_bytes - free_bytes
        super().__init__(
            f"{needed_bytes} bytes of memory are needed{' on ' + where if where else ''}; {free_bytes} of {total_bytes}"
            f" are free, {missing_bytes} are missing",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            missing_bytes=missing_bytes,
        )


class ExecutablesMissing(RuntimeServiceError):
    """A bundle with weights only, which cannot be loaded by itself."""

    reason = "EXECUTABLES_MISSING"

    def __init__(self, ref: str) -> None:
        super().__init__(
            f"{ref} has weights only: load the bundle that it was sharded for, then these with LoadWeights", ref=ref
        )


class WeightsMissing(RuntimeServiceError):
    """A bundle with executables only, which has no weights to give."""

    reason = "WEIGHTS_MISSING"

    def __init__(self, ref: str) -> None:
        super().__init__(f"{ref} has no weights: it was compiled without them", ref=ref)


class AliasFollowed(RuntimeServiceError):
    """A LoadWeights call for a deployment whose weights follow an alias."""

    reason = "ALIAS_FOLLOWED"

    def __init__(self, deployment_id: str, alias: str) -> None:
        super().__init__(
            f"the weights of deployment {deployment_id!r} follow {alias}: move the alias, or load it without following",
            deployment_id=deployment_id,
            alias=alias,
        )


class GraphAbiMismatch(RuntimeServiceError):
    """Weights that do not fit the running executables."""

    reason = "GRAPH_ABI_MISMATCH"

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(
            f"the weights fit graph ABI {actual}; the deployment runs {expected}", expected=expected, actual=actual
        )


class TokenizerMismatch(RuntimeServiceError):
    """Weights that were trained with another vocabulary."""

    reason = "TOKENIZER_MISMATCH"

    def __init__(self, expected: str, actual: str) -> None:
        message = f"the weights belong to tokenizer {actual}; the deployment uses {expected}"
        super().__init__(message, expected=expected, actual=actual)


class LoadInProgress(RuntimeServiceError):
    """A second weight load while another one runs."""

    reason = "LOAD_IN_PROGRESS"

    def __init__(self, deployment_id: str) -> None:
        super().__init__(f"deployment {deployment_id!r} is loading weights already", deployment_id=deployment_id)


class BundleSourceUnavailable(RuntimeServiceError):
    """A bundle service that does not answer."""

    reason = "BUNDLE_SOURCE_UNAVAILABLE"

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(
            f"the bundle service at {source} does not answer: {detail}",
            retry_after_s=1.0,
            source=source,
            detail=detail,
        )


class BucketExceeded(RuntimeServiceError):
    """More tokens, positions or rows than any executable has."""

    reason = "BUCKET_EXCEEDED"

    def __init__(self, submodel: str, dimension: str, needed: int, largest: int) -> None:
        message = f"{needed} {dimension} exceed the largest bucket of {submodel}, {largest}"
        super().__init__(message, submodel=submodel, dimension=dimension, needed=needed, largest=largest)


class EngineFailed(RuntimeServiceError):
    """An engine that a bug of Kiln stopped."""

    reason = "ENGINE_FAILED"

    def __init__(self, deployment_id: str) -> None:
        super().__init__(
            f"the engine of deployment {deployment_id!r} has failed; unload and load it again",
            deployment_id=deployment_id,
        )


class StateUnwritable(RuntimeServiceError):
    """A disk that does not take the records of deployments."""

    reason = "STATE_UNWRITABLE"

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"{path} cannot be written: {detail}", path=path, detail=detail)
