import argparse
from pathlib import Path

import pytest

from edge.config import EdgeConfig, TlsConfig
from edge.options import add_server_options, byte_size, positive_integer, read_edge_config

GIB = 1 << 30


def parse(*arguments: str) -> EdgeConfig:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    parser.add_argument("--count", type=positive_integer)
    return read_edge_config(parser, parser.parse_args(["--address", "127.0.0.1:0", *arguments]))


def test_defaults() -> None:
    assert parse() == EdgeConfig("127.0.0.1:0", drain_timeout_s=10.0)


def test_tls() -> None:
    config = parse("--tls-certificate", "a.pem", "--tls-key", "b.pem", "--tls-client-ca", "c.pem")
    assert config.tls == TlsConfig(Path("a.pem"), Path("b.pem"), Path("c.pem"))


@pytest.mark.parametrize("arguments", [["--tls-certificate", "a"], ["--tls-key", "b"], ["--tls-client-ca", "c"]])
def test_half_of_tls_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert "belong together" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "one"])
def test_positive_integer(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--count", count)
    assert "--count" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1", 1), ("7KiB", 7 << 10), ("1536MiB", 3 * GIB // 2), ("8GiB", 8 * GIB), ("2TiB", 2048 * GIB)],
)
def test_byte_size(text: str, size_bytes: int) -> None:
    assert byte_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "8GB", "8 GiB", "1.5GiB", "GiB", "٣"])
def test_what_is_no_byte_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size; accepted: bytes, or a number with KiB"):
        byte_size(text)
