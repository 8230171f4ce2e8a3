"""The errors of the runtime service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bundle.errors import FieldViolation, KilnError, Unsaid


class RuntimeServiceError(KilnError):
    """Root of the runtime service's errors."""


class RequestInvalid(RuntimeServiceError, code="INVALID_ARGUMENT"):
    """Values that no deployment would take."""

    message = "{violations}"
    violations: Sequence[FieldViolation]


class FeatureNotServed(RuntimeServiceError, code="INVALID_ARGUMENT"):
    """A valid request for a feature that this deployment lacks."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__(
            "not served: " + "; ".join(map(str, violations)),
            violations=tuple(violations),
            fields=",".join(violation.field for violation in violations),
        )


class PromptTooLong(RuntimeServiceError, code="INVALID_ARGUMENT"):
    """A prompt that leaves the executables no room."""

    def __init__(self, field: str, size: int, limit: int, unit: str = "tokens") -> None:
        self.field, self.size, self.limit, self.unit = field, size, limit, unit
        violation = FieldViolation(field, f"{size} {unit}", f"at most {limit} {unit}")
        super().__init__(
            f"the prompt is too long: {violation}",
            violations=(violation,),
            field=field,
            **{f"num_{unit}": size, f"max_{unit}": limit},
        )


class PromptLimitExceeded(RuntimeServiceError, code="INVALID_ARGUMENT"):
    """A prompt whose chat template or tokenizer has reached a limit of the deployment's text process."""

    violation = FieldViolation(
        "{field}", "needs more than {limit}", "what the bundle's tokenizer and chat template convert with {limit}"
    )
    field: str
    limit: str


class ConstraintLimitExceeded(RuntimeServiceError, code="INVALID_ARGUMENT"):
    """A constraint that takes too long or too much memory to compile, or to keep while a sequence is generated."""

    violation = FieldViolation("{field}", "reaches a limit: {limit}", "a constraint that takes less to keep")
    field: str
    limit: str


class ConstraintUnspelled(RuntimeServiceError, code="INVALID_ARGUMENT"):
    """A constraint that wants text, behind what a sequence has, that no tokens of the model have."""

    message = "no tokens have the text that comes next: {violation}"
    violation = FieldViolation("{field}", "{wanted}", "text that tokens of the model have", quotes_text=True)
    field: str
    wanted: str


class ConstraintFailed(RuntimeServiceError, code="INTERNAL"):
    """A bug of Kiln that keeps it from finding the tokens that a constraint allows next."""

    message = "the tokens that the constraint allows next cannot be found: {cause}"
    cause: str


class DeploymentNotFound(RuntimeServiceError, code="NOT_FOUND"):
    """An id that names no deployment."""

    message = "no deployment {deployment_id!r}"
    deployment_id: str


class DeploymentNotReady(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A deployment that is being loaded or unloaded, awaits weights, is recovering, or has failed."""

    def __init__(self, deployment_id: str, state: str, detail: str = "") -> None:
        message = f"deployment {deployment_id!r} is {state}" + (f": {detail}" if detail else "")
        super().__init__(message, deployment_id=deployment_id, state=state, detail=detail)


class DeploymentExists(RuntimeServiceError, code="ALREADY_EXISTS"):
    """An id that another bundle, or the same one with other options, holds."""

    def __init__(self, deployment_id: str, bundle_digest: str, detail: str = "") -> None:
        super().__init__(
            f"deployment {deployment_id!r} exists already with bundle {bundle_digest}"
            + (detail and f" and {detail}")
            + f"; LoadWeights (`kiln load-weights {deployment_id} REF`) replaces its weights, UnloadBundle "
            f"(`kiln unload {deployment_id}`) ends it",
            deployment_id=deployment_id,
            bundle_digest=bundle_digest,
        )


class DeploymentNotChosen(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A call that names no deployment, while not exactly one serves."""

    def __init__(self, serving_ids: Sequence[str]) -> None:
        serving = ", ".join(serving_ids)
        detail = f"several serve: {serving}; --engine-deployment of the runtime names one" if serving else "none serves"
        super().__init__(f"this API names no deployment, and {detail}", deployment_ids=serving)


class EngineNotServing(RuntimeServiceError, code="UNAVAILABLE"):
    """A Generate of vLLM's engine API while the runtime has no deployment that could answer: another runtime may."""

    message = "vLLM's engine API does not serve now: {detail}"
    detail: str


class MethodNotServed(RuntimeServiceError, code="UNIMPLEMENTED"):
    """A method of an API of others that Kiln does not serve."""

    message = "{method} is not served: {detail}"
    method: str
    detail: str


class RequestIdInUse(RuntimeServiceError, code="ALREADY_EXISTS"):
    """A request id that a running request has."""

    message = "request id {request_id!r} is in use"
    request_id: str


class RequestsInFlight(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A call with policy REFUSE while requests run."""

    message = "{num_requests} requests are in flight"
    num_requests: int


class QueueFull(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
    """A queue that holds as many requests as it may."""

    message = "{capacity} requests wait already"
    capacity: int
    retry_after_s: float


class RequestAborted(RuntimeServiceError, code="ABORTED"):
    """A request that another call ended."""

    message = "request {request_id!r} was ended by {cause}"
    request_id: str
    cause: str


class DeadlineExceeded(RuntimeServiceError, code="DEADLINE_EXCEEDED"):
    """A request that its call's deadline ended."""

    message = "request {request_id!r} met its deadline"
    request_id: str


class NumericsInvalid(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A request whose logits are NaN or infinite: its prompt makes the model's numbers overflow, or weights are NaN."""

    message = "the logits of request {request_id!r} are NaN or infinite after {num_tokens} tokens, prompt included"
    request_id: str
    num_tokens: int


class ShuttingDown(RuntimeServiceError, code="UNAVAILABLE"):
    """A request that the server refuses or ends because it shuts down."""

    message = "the server is shutting down"


class CoresUnavailable(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
    """Cores that the server does not have, or that another deployment holds.

    Attributes:
        is_lasting: Whether they would be unavailable without other deployments, too.
    """

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


class MemoryUnavailable(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
    """A deployment that needs more memory than is free.

    Attributes:
        is_lasting: Whether it needs more than there is.
    """

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


class ExecutablesMissing(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A bundle with weights or an adapter only, which cannot be loaded by itself."""

    message = "{ref} has no executables: load the bundle that it was made for, then this one with {method}"
    ref: str
    method: str


class WeightsMissing(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A bundle with executables or adapters only, which has no weights to give."""

    message = "{ref} has no weights: {detail}"
    ref: str
    detail: Unsaid[str]


class AliasFollowed(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A LoadWeights call for a deployment whose weights follow an alias."""

    message = "the weights of deployment {deployment_id!r} follow {alias}: move the alias, or load it without following"
    deployment_id: str
    alias: str


class GraphAbiMismatch(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """Weights or an adapter that do not fit the running executables."""

    message = "the bundle fits graph ABI {actual}; the deployment runs {expected}"
    expected: str
    actual: str


class TokenizerMismatch(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """Weights that were trained with another vocabulary."""

    message = "the weights belong to tokenizer {actual}; the deployment uses {expected}"
    expected: str
    actual: str


class LoadInProgress(RuntimeServiceError, code="ABORTED"):
    """A second weight load while another one runs."""

    message = "deployment {deployment_id!r} is loading weights already"
    deployment_id: str


class OldWeightsInUse(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A load of weights while requests run on with old ones: ranks map two sets at most."""

    message = (
        "{num_requests} requests run on with the weights of epoch {weight_epoch}; repeat the call when they have ended,"
        " or load those weights, which need no room"
    )
    num_requests: int
    weight_epoch: int


class BundleSourceUnavailable(RuntimeServiceError, code="UNAVAILABLE"):
    """A bundle service that does not answer."""

    message = "the bundle service at {source} does not answer: {detail}"
    retry_after_s = 1.0
    source: str
    detail: str


class EngineFailed(RuntimeServiceError, code="INTERNAL"):
    """An engine that a bug of Kiln stopped."""

    message = "the engine of deployment {deployment_id!r} has failed; unload and load it again"
    deployment_id: str


class StateUnwritable(RuntimeServiceError, code="INTERNAL"):
    """A disk that does not take the records of deployments."""

    message = "{path} cannot be written: {detail}"
    path: str
    detail: str


class SessionBusy(RuntimeServiceError, code="ABORTED"):
    """A session that a request uses: its requests go one after the other."""

    message = "session {session_id!r} is in use by request {request_id!r}, which has not ended"
    session_id: str
    request_id: str


class SessionNotFound(RuntimeServiceError, code="NOT_FOUND"):
    """A session that the caller does not have: it has expired, made room for others, or never was."""

    message = "the caller has no session {session_id!r}"
    session_id: str


class TooManySessions(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
    """A new session while requests use as many sessions as a caller or a deployment may have."""

    message = "requests use {limit} sessions, as many as a {bounded} may have"
    retry_after_s = 1.0
    limit: int
    bounded: Unsaid[str]


class TooManyCaptures(RuntimeServiceError, code="RESOURCE_EXHAUSTED"):
    """A request for captured inputs while the allowed number of requests captures."""

    message = "{limit} requests capture inputs already"
    limit: int
    retry_after_s: float


class CaptureUnwritable(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A disk that does not take captured inputs."""

    message = "captured inputs cannot be written to {path} in the capture directory: {detail}"
    path: str
    detail: str


class AdapterUnwritable(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """An adapter that was loaded, and whose files the ranks can no longer read: requests that wait for it end."""

    message = "adapter {adapter!r} cannot be written to the ranks: {cause}; LoadAdapter brings its files again"
    adapter: str
    cause: str


class LoadQuarantined(RuntimeServiceError, code="FAILED_PRECONDITION", reason="QUARANTINED"):
    """A deployment whose load was under way when the runtime died, twice: it is not loaded again by itself."""

    message = (
        "deployment {deployment_id!r} is quarantined: the runtime died {num_deaths} times while it loaded it, and "
        "does not load it again by itself; LoadBundle (`kiln load {ref} --deployment {deployment_id}`) tries again, "
        "UnloadBundle (`kiln unload {deployment_id}`) ends it"
    )
    deployment_id: str
    ref: str
    num_deaths: int


class PromptQuarantined(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """A prompt over which ranks died, hung or failed twice, the last time over it alone."""

    def __init__(self, digest: str, num_losses: int, expires_in_s: float) -> None:
        super().__init__(
            f"the ranks were lost {num_losses} times while they computed this prompt, the last time while they "
            f"computed nothing else, so it is refused for {expires_in_s:.0f} s; unloading and loading the deployment, "
            f"or loading other weights, ends that sooner",
            digest=digest,
            num_losses=num_losses,
            expires_in_s=f"{expires_in_s:.0f}",
        )


class WeightsQuarantined(RuntimeServiceError, code="FAILED_PRECONDITION"):
    """Weights of a followed alias that were being loaded when the runtime died, twice: the old ones serve on."""

    message = (
        "they are quarantined: the runtime died {num_deaths} times while it loaded them, and does not load them again "
        "by itself; move {ref} to another version, or try again by LoadBundle (`kiln load {ref} --deployment "
        "{deployment_id} --follow-alias`)"
    )
    deployment_id: str
    ref: str
    digest: str
    num_deaths: int
