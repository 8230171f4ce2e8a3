import resource
from pathlib import Path

import pytest

from edge.access.config import AccessConfig
from edge.config import EdgeConfig, TlsConfig, choose_max_connections
from edge.errors import OptionsInvalid
from edge.option_sources import read_options
from edge.options import COUNT, DAYS, FLAG, SECONDS, SIZE, TEXT, Domain, one_of

GIB = 1 << 30


def parse(*arguments: str) -> EdgeConfig:
    return read_options("probe", EdgeConfig, ["--address", "127.0.0.1:0", *arguments], {})


def test_defaults() -> None:
    assert parse() == EdgeConfig("127.0.0.1:0", max_connections=choose_max_connections())
    assert (parse().drain_timeout_s, parse().stall_timeout_s, parse().access.audience) == (10.0, 30.0, "kiln")


@pytest.mark.parametrize(
    ("max_files", "max_connections"), [(256, 128), (1024, 512), (1 << 20, 4096), (1, 1), (resource.RLIM_INFINITY, 4096)]
)
def test_connections_leave_half_of_the_files_to_others(
    max_files: int, max_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, max_files))
    assert parse().max_connections == max_connections
    assert parse("--max-connections", "7").max_connections == 7


@pytest.mark.parametrize("arguments", [["--tls-certificate", "a"], ["--tls-key", "b"], ["--tls-client-ca", "c"]])
def test_half_of_tls_is_refused(arguments: list[str]) -> None:
    with pytest.raises(OptionsInvalid, match="the first two together"):
        parse(*arguments)


def test_access() -> None:
    tls = ("--tls-certificate", "a.pem", "--tls-key", "b.pem", "--tls-client-ca", "c.pem")
    config = parse(
        *tls,
        *("--auth-jwks", "https://issuer.example/jwks.json", "--auth-audience", "a", "--auth-issuer", "i"),
        *("--auth-clock-skew", "5", "--auth-identities", "i.yaml", "--require-auth"),
        *("--max-streams-per-principal", "7"),
    )
    assert config.tls == TlsConfig(Path("a.pem"), Path("b.pem"), Path("c.pem"))
    assert config.access == AccessConfig(
        jwks="https://issuer.example/jwks.json",
        audience="a",
        issuer="i",
        clock_skew_s=5,
        identities=Path("i.yaml"),
        is_required=True,
        max_streams=7,
    )
    assert parse("--allow-anonymous").access.allow_anonymous
    assert parse().reflection
    assert not parse("--no-reflection").reflection


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--require-auth"], "require-auth: got true; accepted: false without auth-jwks or tls-client-ca"),
        (["--auth-identities", "i.yaml"], "auth-identities: got no tls-client-ca"),
        (["--auth-jwks", "http://issuer.example/jwks.json"], "accepted: a path or an https URL"),
        (["--auth-jwks", "https://"], "accepted: a path or an https URL"),
        (["--auth-jwks", "file:///etc/jwks.json"], "accepted: a path or an https URL"),
    ],
)
def test_access_that_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(OptionsInvalid, match=message):
        parse(*arguments)


@pytest.mark.parametrize(
    ("domain", "text", "value"),
    [
        (COUNT, "7", 7),
        (SECONDS, "0.5", 0.5),
        (DAYS, "30", 30.0),
        (FLAG, "true", True),
        (FLAG, "false", False),
        (one_of("cached", "always"), "always", "always"),
        (one_of(cached=False, always=True), "cached", False),
        (SIZE, "1", 1),
        (SIZE, "7KiB", 7 << 10),
        (SIZE, "1536MiB", 3 * GIB // 2),
        (SIZE, "8GiB", 8 * GIB),
        (SIZE, "2TiB", 2048 * GIB),
    ],
)
def test_values(domain: Domain, text: str, value: object) -> None:
    assert domain.parse(text) == value


@pytest.mark.parametrize(
    ("domain", "texts"),
    [
        (COUNT, ["0", "-1", "one", ""]),
        (SECONDS, ["0", "-1", "nan", "inf", "soon"]),
        (FLAG, ["on", "1", "yes", ""]),
        (TEXT, [""]),
        (one_of("cached", "always"), ["never", "CACHED", ""]),
        (SIZE, ["", "0", "-1", "8GB", "8 GiB", "1.5GiB", "GiB", "٣"]),
    ],
)
def test_values_outside_of_a_domain(domain: Domain, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises((ValueError, KeyError)):
            domain.parse(text)
