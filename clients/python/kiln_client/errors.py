"""Errors of the client: those of the services, and those that the client itself raises.

KilnError                     root; also any status code without a class of its own
├── InvalidArgument           INVALID_ARGUMENT, with one FieldViolation per mistake
│   ├── DocumentInvalid       a YAML or JSON document that the client cannot read
│   ├── OverrideInvalid       an override of a configuration that says nothing, or leads nowhere
│   ├── PlaintextRefused      a gateway that others than this host could reach
│   └── TokenInPlaintext      a token that others than this host could read; see kiln_client.auth.errors
├── NotFound                  NOT_FOUND
│   └── ModelNotFound         `kiln run` or `kiln serve` with a model that is nowhere
├── AlreadyExists             ALREADY_EXISTS
├── PermissionDenied          PERMISSION_DENIED
├── Unauthenticated           UNAUTHENTICATED
├── FailedPrecondition        FAILED_PRECONDITION
│   ├── TokenUnusable         a token, or the file of one, that the client cannot use; see kiln_client.auth.errors
│   ├── ServiceNotInstalled   `kiln up` without the service's distribution
│   ├── HomeNotPrivate        a home that others may enter; see kiln_client.stack.errors, as for TokenNotMade
│   ├── HomeInUse             `kiln up` or `kiln serve` on a home directory that another process serves
│   ├── HubNotInstalled       a download without the distribution huggingface_hub
│   ├── GatewayNotInstalled   `kiln serve --openai` without the distribution smg
│   ├── HomeBusy              services that `kiln run` would start again answer requests
│   ├── ModelRootMissing      running services may not read the checkpoint
│   ├── ModelTooLarge         a model that does not fit into the runtime's memory
│   ├── ServicesNotRunning    no process serves the home directory
│   └── ServicesNotStopped    services that `kiln down` could not end
├── ResourceExhausted         RESOURCE_EXHAUSTED, usually with retry_after_s
├── Aborted                   ABORTED
├── Cancelled                 CANCELLED
│   └── ClientClosed          the client was closed while the call ran
├── DeadlineExceeded          DEADLINE_EXCEEDED
├── Unimplemented             UNIMPLEMENTED
│   └── WrongService          a server that is not the one the call is for
├── Unavailable               UNAVAILABLE, a lost or refused connection too
│   ├── ServiceExited         a service that `kiln up` started is gone
│   ├── ServiceNotReady       a service that `kiln up` started did not become healthy in time
│   ├── HubFailed             a model that the Hub does not give
│   └── ServicesNotStarted    services that `kiln run` started in the background did not come up
├── DataLoss                  DATA_LOSS
└── Internal                  INTERNAL and UNKNOWN
    └── StreamIncomplete      a stream that ended well without its result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One mistake in a request.

    Attributes:
        field: Path of the field, such as `neuron_config.seq_len`.
        description: The given value and the accepted ones.
        reason: UPPER_SNAKE identifier of the mistake; empty if the server gave none.
    """

    field: str
    description: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class KilnError(Exception):
    """Root of all errors of this package.

    Attributes:
        code: Canonical status code, such as `NOT_FOUND`.
        reason: UPPER_SNAKE identifier of the cause, such as `DEPLOYMENT_NOT_FOUND`; the code if there is none.
        message: One sentence for a person.
        metadata: Variables of the message by name.
        fields: Mistakes in the request; empty if the request is not at fault.
        retry_after_s: Seconds after which the server suggests to try again; None if it suggests nothing.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: str = "",
        metadata: Mapping[str, str] | None = None,
        fields: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.reason = reason or self.code
        self.message = message
        self.metadata = dict(metadata or {})
        self.fields = tuple(fields)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        lines = [f"{self.code}/{self.reason}: {self.message}"]
        lines += [f"  {violation}" for violation in self.fields]
        return "\n".join(lines)


class InvalidArgument(KilnError):
    """The request is wrong whatever the state of the server."""

    default_code = "INVALID_ARGUMENT"


class DocumentInvalid(InvalidArgument):
    """A YAML or JSON document that the client cannot read."""

    def __init__(self, source: str, detail: str, *, reason: str, field: str) -> None:
        violation = FieldViolation(field, f"{detail}; accepted: a mapping or a list in YAML or JSON", reason)
        super().__init__(
            f"{source} cannot be read: {detail}", reason=reason, fields=(violation,), metadata={"source": source}
        )


class OverrideInvalid(InvalidArgument):
    """An override of a configuration that says nothing, or leads nowhere."""

    def __init__(self, text: str, detail: str) -> None:
        violation = FieldViolation("override", detail, "CONFIG_INVALID")
        message = f"the override {text!r} cannot be applied: {detail}"
        super().__init__(message, reason="CONFIG_INVALID", fields=(violation,), metadata={"override": text})


class PlaintextRefused(InvalidArgument):
    """A gateway that others than this host could reach was asked for without permission."""

    def __init__(self, option: str, address: str) -> None:
        accepted = "a loopback address, or --allow-insecure"
        violation = FieldViolation(option, f"got {address!r}; accepted: {accepted}", "PLAINTEXT_REFUSED")
        super().__init__(
            f"{address} is beyond this host, and the gateway has neither TLS nor authentication: every client"
            " that reaches it can use the model, and give it other runtimes",
            reason="PLAINTEXT_REFUSED",
            fields=(violation,),
            metadata={"address": address},
        )


class NotFound(KilnError):
    """What the request names does not exist."""

    default_code = "NOT_FOUND"


class ModelNotFound(NotFound):
    """`kiln run` or `kiln serve` was given a model that is nowhere."""

    def __init__(self, model: str, accepted: str) -> None:
        violation = FieldViolation("model", f"got {model!r}; accepted: {accepted}", "MODEL_NOT_FOUND")
        message = f"there is no model {model!r}"
        super().__init__(message, reason="MODEL_NOT_FOUND", fields=(violation,), metadata={"model": model})


class AlreadyExists(KilnError):
    """What the request would create exists."""

    default_code = "ALREADY_EXISTS"


class PermissionDenied(KilnError):
    """The caller may not do this."""

    default_code = "PERMISSION_DENIED"


class Unauthenticated(KilnError):
    """The server does not know who is calling."""

    default_code = "UNAUTHENTICATED"


class FailedPrecondition(KilnError):
    """The request is right, the state of the server is not."""

    default_code = "FAILED_PRECONDITION"


class ServiceNotInstalled(FailedPrecondition):
    """`kiln up` was asked to start a service whose distribution is not installed."""

    def __init__(self, service: str, distribution: str) -> None:
        super().__init__(
            f"the {service} service is not installed: install the distribution {distribution} beside kiln-client",
            reason="SERVICE_NOT_INSTALLED",
            metadata={"service": service, "distribution": distribution},
        )


class HomeInUse(FailedPrecondition):
    """`kiln up` or `kiln serve` was asked to serve a home directory that another process serves."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"another process serves {home}: end it with `kiln down --home {home}`, or choose another --home",
            reason="HOME_IN_USE",
            metadata={"home": str(home)},
        )


class HubNotInstalled(FailedPrecondition):
    """A download was asked for, and the distribution that talks to the Hub is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "downloads need the distribution huggingface_hub: install kiln-client[hub]", reason="HUB_NOT_INSTALLED"
        )


class GatewayNotInstalled(FailedPrecondition):
    """`kiln serve --openai` was asked for, and the gateway's distribution is not installed."""

    def __init__(self) -> None:
        super().__init__(
            'the APIs of OpenAI and Anthropic need the distribution smg: pip install "kiln-client[openai]"',
            reason="GATEWAY_NOT_INSTALLED",
        )


class HomeBusy(FailedPrecondition):
    """Services that must start again, to read another directory, are answering requests."""

    def __init__(self, path: Path, home: Path) -> None:
        super().__init__(
            f"the services of {home} must start again to read {path}, but they are answering requests: try again when"
            " those have ended, or end the services with `kiln down`",
            reason="HOME_BUSY",
            metadata={"home": str(home), "path": str(path)},
        )


class ModelRootMissing(FailedPrecondition):
    """Services that a person started may not read the checkpoint."""

    def __init__(self, path: Path, home: Path, model_roots: Sequence[str]) -> None:
        super().__init__(
            f"the services of {home} read checkpoints below {', '.join(model_roots)} only: start them with"
            f" --model-root {path}",
            reason="MODEL_ROOT_MISSING",
            metadata={"home": str(home), "path": str(path)},
        )


class ModelTooLarge(FailedPrecondition):
    """A model does not fit into the runtime's memory, even with the shortest sequences."""

    def __init__(self, model: str, needed_bytes: int, memory_bytes: int) -> None:
        super().__init__(
            f"{model} needs {needed_bytes / 2**30:.1f} GiB, and the runtime has {memory_bytes / 2**30:.1f} GiB",
            reason="MODEL_TOO_LARGE",
            metadata={"model": model, "needed_bytes": str(needed_bytes), "memory_bytes": str(memory_bytes)},
        )


class ServicesNotRunning(FailedPrecondition):
    """No process serves the home directory."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            f"no services run on {home}: `kiln run MODEL` starts them, and so does `kiln up --home {home}`",
            reason="SERVICES_NOT_RUNNING",
            metadata={"home": str(home)},
        )


class ServicesNotStopped(FailedPrecondition):
    """Services were asked to end and still run."""

    def __init__(self, home: Path, pid: int) -> None:
        super().__init__(
            f"the services of {home} were asked to end, and process {pid} still runs",
            reason="SERVICES_NOT_STOPPED",
            metadata={"home": str(home), "pid": str(pid)},
        )


class ResourceExhausted(KilnError):
    """A queue, a core or memory is full."""

    default_code = "RESOURCE_EXHAUSTED"


class Aborted(KilnError):
    """A change by another client came first."""

    default_code = "ABORTED"


class Cancelled(KilnError):
    """The call was cancelled."""

    default_code = "CANCELLED"


class ClientClosed(Cancelled):
    """The client was closed while the call ran."""

    def __init__(self) -> None:
        super().__init__("the client was closed while the call ran", reason="CLIENT_CLOSED")


class DeadlineExceeded(KilnError):
    """The call's deadline passed."""

    default_code = "DEADLINE_EXCEEDED"


class Unimplemented(KilnError):
    """The server does not have this method."""

    default_code = "UNIMPLEMENTED"


class WrongService(Unimplemented):
    """A server that is not the one the call is for, such as the compiler at the address of the runtime."""

    def __init__(self, address: str, wanted: str, found: str) -> None:
        answers = f"the {found} answers at {address}" if found else f"{address} is no {wanted} of Kiln"
        super().__init__(
            f"{answers}, and the call is for the {wanted}: check --{wanted}, or KILN_{wanted.upper()}",
            reason="WRONG_SERVICE",
            metadata={"address": address, "wanted": wanted, "found": found},
        )


class Unavailable(KilnError):
    """The server cannot be reached or cannot answer now."""

    default_code = "UNAVAILABLE"


class ServiceExited(Unavailable):
    """A service that `kiln up` started is gone."""

    def __init__(self, service: str, returncode: int, log_path: Path, log_tail: str) -> None:
        how = f"exited with code {returncode}" if returncode >= 0 else f"was killed by signal {-returncode}"
        message = f"the {service} service {how}; its log is {log_path}"
        super().__init__(
            f"{message}\n{log_tail}" if log_tail else message,
            reason="SERVICE_EXITED",
            metadata={"service": service, "returncode": str(returncode), "log": str(log_path)},
        )


class ServiceNotReady(Unavailable):
    """A service that `kiln up` started did not become healthy in time."""

    def __init__(self, service: str, timeout_s: float, log_path: Path) -> None:
        super().__init__(
            f"the {service} service was not ready after {timeout_s:g} s; its log is {log_path}",
            reason="SERVICE_NOT_READY",
            metadata={"service": service, "timeout_s": f"{timeout_s:g}", "log": str(log_path)},
        )


class HubFailed(Unavailable):
    """The Hub does not give a model: it does not exist, the user may not read it, or the Hub cannot be reached."""

    def __init__(self, repo_id: str, detail: str) -> None:
        super().__init__(
            f"{repo_id} cannot be downloaded: {detail}", reason="HUB_FAILED", metadata={"repo_id": repo_id}
        )


class ServicesNotStarted(Unavailable):
    """Services that `kiln run` started in the background did not come up."""

    def __init__(self, detail: str, log_path: Path, log_tail: str) -> None:
        message = f"the services did not start: {detail}; their log is {log_path}"
        super().__init__(
            f"{message}\n{log_tail}" if log_tail else message,
            reason="SERVICES_NOT_STARTED",
            metadata={"log": str(log_path)},
        )


class DataLoss(KilnError):
    """Stored bytes are corrupt."""

    default_code = "DATA_LOSS"


class Internal(KilnError):
    """A bug, here or in the server."""

    default_code = "INTERNAL"


class StreamIncomplete(Internal):
    """A stream that ended well without its result, or with a gap."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"the server's stream is incomplete: {detail}", reason="STREAM_INCOMPLETE")
