import argparse
from pathlib import Path

import pytest

from edge.config import EdgeConfig, TlsConfig
from edge.options import add_server_options, positive_integer, read_edge_config


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
