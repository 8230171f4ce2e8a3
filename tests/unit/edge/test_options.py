import resource
from pathlib import Path

import pytest

from edge.config import EdgeConfig, TlsConfig
from edge.errors import OptionsInvalid
from edge.option_sources import read_options
from edge.options import (
    COUNT,
    DAYS,
    FLAG,
    SECONDS,
    SERVER_OPTIONS,
    SIZE,
    TEXT,
    Domain,
    choose_max_connections,
    one_of,
    read_edge_config,
)

GIB = 1 << 30


def parse(*arguments: str) -> EdgeConfig:
    return read_edge_config(read_options("probe", SERVER_OPTIONS, ["--address", "127.0.0.1:0", *arguments], {}))


def test_defaults() -> None:
    assert parse() == EdgeConfig("127.0.0.1:0", drain_timeout_s=10.0, max_connections=choose_max_connections())


@pytest.mark.parametrize(
    ("max_files", "max_connections"), [(256, 128), (1024, 512), (1 << 20, 4096), (1, 1), (resource.RLIM_INFINITY, 4096)]
)
def test_connections_leave_half_of_the_files_to_others(
    max_files: int, max_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (max_files, max_files))
    assert parse().max_connections == max_connections
    assert parse("--max-connections", "7").max_connections == 7


def test_tls() -> None:
    config = parse("--tls-certificate", "a.pem", "--tls-key", "b.pem", "--tls-client-ca", "c.pem")
    assert config.tls == TlsConfig(Path("a.pem"), Path("b.pem"), Path("c.pem"))


@pytest.mark.parametrize("arguments", [["--tls-certificate", "a"], ["--tls-key", "b"], ["--tls-client-ca", "c"]])
def test_half_of_tls_is_refused(arguments: list[str]) -> None:
    with pytest.raises(OptionsInvalid, match="the first two together"):
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
