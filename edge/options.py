"""The options of our servers, each stated once. `edge.option_sources` reads their values."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bundle.errors import FieldViolation
from edge.access.config import AccessConfig
from edge.config import MAX_CONNECTIONS, EdgeConfig, LocalListener, TlsConfig
from edge.errors import OptionsInvalid
from edge.logs import LEVELS, LogConfig

_SIZE: Final = re.compile(r"([1-9][0-9]{0,15})(|KiB|MiB|GiB|TiB)")
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FLAGS: Final = {"true": True, "false": False}
_ACCESS: Final = AccessConfig()


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that an option takes.

    Attributes:
        accepted: The values in words, for messages.
        metavar: Stands for the value in the usage line.
        parse: Makes the value of its text; raises ValueError if the text is none.
    """

    accepted: str
    metavar: str
    parse: Callable[[str], Any]


def one_of(*words: str) -> Domain:
    """Returns the domain of an option that takes one of several words."""
    return Domain(", ".join(words), "|".join(words), dict(zip(words, words, strict=True)).__getitem__)


def _parse_text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _parse_count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(text)
    return seconds


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * _UNITS[match[2]]


def _parse_key_place(text: str) -> str:
    if "://" in text and not re.match(r"https://[^/]", text):
        raise ValueError(text)
    return _parse_text(text)


FLAG: Final = Domain("true or false", "BOOL", _FLAGS.__getitem__)
TEXT: Final = Domain("text", "TEXT", _parse_text)
ADDRESS: Final = Domain("HOST:PORT", "HOST:PORT", _parse_text)
PATH: Final = Domain("a path", "PATH", lambda text: Path(_parse_text(text)))
KEY_PLACE: Final = Domain("a path or an https URL", "PATH|URL", _parse_key_place)
COUNT: Final = Domain("an integer of at least 1", "N", _parse_count)
SECONDS: Final = Domain("a number above 0", "SECONDS", _parse_seconds)
DAYS: Final = Domain("a number above 0", "DAYS", _parse_seconds)
SIZE: Final = Domain("bytes, or an integer with KiB, MiB, GiB, TiB", "SIZE", _parse_size)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a server: on its command line, in its environment and in its file.

    Attributes:
        name: As the file has it, such as `drain-timeout`.
        domain: The values that it takes.
        help: One phrase, without the default.
        default: The value if no source gives one.
        default_text: The default in words; empty if `default` says it.
        is_required: Whether one of the sources must give a value.
        is_repeatable: Whether it takes several values; `default` is then a tuple.
    """

    name: str
    domain: Domain
    help: str
    default: Any = None
    default_text: str = ""
    is_required: bool = False
    is_repeatable: bool = False

    @property
    def attribute(self) -> str:
        """The name of the value once it is read."""
        return self.name.replace("-", "_")

    def describe_default(self) -> str:
        """Returns the default in words; empty if there is none."""
        if self.default_text or self.default is None or self.default == ():
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


#: The options of every server.
SERVER_OPTIONS: Final = (
    Option("address", ADDRESS, "where to listen; port 0 takes a free one", is_required=True),
    Option("tls-certificate", PATH, "certificate chain, PEM"),
    Option("tls-key", PATH, "private key, PEM"),
    Option("tls-client-ca", PATH, "certificates that clients' ones must lead to, PEM"),
    Option("allow-insecure", FLAG, "serve in plaintext beyond loopback", default=False),
    Option("auth-jwks", KEY_PLACE, "public keys (JWKS) that tokens are verified with", default_text="no tokens"),
    Option("auth-audience", TEXT, "audience (`aud`) that tokens must be for", default=_ACCESS.audience),
    Option("auth-issuer", TEXT, "issuer (`iss`) that tokens must be of", default_text="any whose key is known"),
    Option("auth-clock-skew", SECONDS, "how far an issuer's clock may be off", default=_ACCESS.clock_skew_s),
    Option(
        "auth-identities",
        PATH,
        "YAML or JSON: what clients' certificates stand for, and which are revoked; needs `tls-client-ca`",
    ),
    Option("require-auth", FLAG, "refuse calls without a principal on loopback, too", default=False),
    Option("allow-anonymous", FLAG, "serve calls without a principal beyond loopback", default=False),
    Option(
        "max-streams-per-principal",
        COUNT,
        "streams that one principal may have at once",
        default=_ACCESS.max_streams,
    ),
    Option("reflection", FLAG, "tell clients about the API (gRPC reflection)", default=True),
    Option("drain-timeout", SECONDS, "time for running calls at the end", default=10.0),
    Option(
        "max-connection-age",
        SECONDS,
        "time after which clients are asked to connect anew; running calls finish",
        default=3600.0,
    ),
    Option(
        "max-connection-age-grace",
        SECONDS,
        "time that running calls may take then; they are cut after it",
        default_text="as long as they take",
    ),
    Option("max-connection-idle", SECONDS, "time after which a connection without a call is closed", default=300.0),
    Option(
        "max-connections",
        COUNT,
        "connections at once; further ones are closed at once",
        default_text=f"half of the files that the process may open, at most {MAX_CONNECTIONS}",
    ),
    Option("max-streams-per-connection", COUNT, "calls of one connection at once; further ones wait", default=2048),
    Option(
        "max-calls-per-peer",
        COUNT,
        "calls of one client address at once, probes apart; further ones are refused",
        default=1024,
    ),
    Option("stall-timeout", SECONDS, "time after which a stream whose client does not read is ended", default=30.0),
    Option("metrics-address", ADDRESS, "where to serve metrics for Prometheus, over HTTP", default_text="nowhere"),
    Option(
        "trace-endpoint",
        TEXT,
        "URL that takes traces, OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces",
        default_text="no traces",
    ),
    Option("log-level", one_of(*LEVELS), "least severe level that is logged", default="info"),
    Option("log-file", PATH, "file of the log", default_text="standard error"),
    Option("log-file-size", SIZE, "size at which a new log file begins", default=64 << 20, default_text="64MiB"),
    Option("log-file-backups", COUNT, "older log files that are kept", default=4),
)


def read_log_config(options: Any) -> LogConfig:
    """Makes the configuration of logs from the values of `SERVER_OPTIONS`."""
    return LogConfig(
        level=options.log_level,
        path=None if options.log_file is None else options.log_file.absolute(),
        max_file_bytes=options.log_file_size,
        num_backups=options.log_file_backups,
    )


def read_edge_config(options: Any, *, local_listener: LocalListener | None = None) -> EdgeConfig:
    """Makes the server's configuration from the values of `SERVER_OPTIONS`, and the second address if it has one.

    Raises:
        OptionsInvalid: Values contradict each other.
        AddressInvalid, PlaintextRefused, AnonymousRefused: See `EdgeConfig`.
    """
    tls = None
    if options.tls_certificate is not None and options.tls_key is not None:
        tls = TlsConfig(options.tls_certificate, options.tls_key, options.tls_client_ca)
    elif options.tls_certificate or options.tls_key or options.tls_client_ca:
        violation = FieldViolation(
            "tls-certificate, tls-key, tls-client-ca", "some of them", "the first two together; the third with these"
        )
        raise OptionsInvalid([violation])
    return EdgeConfig(
        options.address,
        tls=tls,
        allow_insecure=options.allow_insecure,
        access=_read_access_config(options),
        local_listener=local_listener,
        reflection=options.reflection,
        drain_timeout_s=options.drain_timeout,
        max_connection_age_s=options.max_connection_age,
        max_connection_age_grace_s=options.max_connection_age_grace,
        max_connection_idle_s=options.max_connection_idle,
        max_connections=options.max_connections or choose_max_connections(),
        max_streams_per_connection=options.max_streams_per_connection,
        max_calls_per_peer=options.max_calls_per_peer,
        stall_timeout_s=options.stall_timeout,
        metrics_address=options.metrics_address,
        trace_endpoint=options.trace_endpoint,
    )


def choose_max_connections() -> int:
    """Chooses the number of connections if no option sets it, so that files and processes never lack descriptors."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft_limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft_limit // 2))


def _read_access_config(options: Any) -> AccessConfig:
    violations = []
    if options.auth_identities is not None and options.tls_client_ca is None:
        violations.append(FieldViolation("auth-identities", "no tls-client-ca beside it", "both, or neither"))
    if options.require_auth and options.auth_jwks is None and options.tls_client_ca is None:
        accepted = "false without auth-jwks or tls-client-ca, which name principals"
        violations.append(FieldViolation("require-auth", "true", accepted))
    if violations:
        raise OptionsInvalid(violations)
    return AccessConfig(
        jwks=options.auth_jwks,
        audience=options.auth_audience,
        issuer=options.auth_issuer,
        clock_skew_s=options.auth_clock_skew,
        identities=options.auth_identities,
        is_required=options.require_auth,
        allow_anonymous=options.allow_anonymous,
        max_streams=options.max_streams_per_principal,
    )
