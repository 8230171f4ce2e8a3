"""The command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import PlaintextRefused
from runtime_svc.settings import parse_settings

REQUIRED = ["--address=127.0.0.1:0", "--compiler=127.0.0.1:7001", "--cache=cache"]


def test_defaults() -> None:
    settings = parse_settings(REQUIRED)
    assert settings.store is None
    assert settings.cache == Path("cache").absolute()
    assert settings.num_cores >= 1
    assert (settings.threads_per_core, settings.verify_always) == (1, False)


def test_every_option_is_read() -> None:
    settings = parse_settings(
        [
            *REQUIRED,
            "--bundle-store=store",
            "--verify=always",
            "--cores=8",
            "--threads-per-core=2",
            "--queue-capacity=3",
            "--stream-capacity=5",
            "--drain-timeout=1.5",
            "--log-level=debug",
            "--tls-certificate=c.pem",
            "--tls-key=k.pem",
            "--tls-client-ca=ca.pem",
        ]
    )
    assert settings.store == Path("store").absolute()
    assert settings.verify_always
    assert (settings.num_cores, settings.threads_per_core) == (8, 2)
    assert (settings.queue_capacity, settings.stream_capacity) == (3, 5)
    assert (settings.edge.drain_timeout_s, settings.log_level) == (1.5, "debug")
    assert settings.edge.tls is not None
    assert settings.edge.tls.client_ca_path == Path("ca.pem")


@pytest.mark.parametrize("arguments", [[], REQUIRED[:2], [*REQUIRED, "--cores=0"], [*REQUIRED, "--verify=never"]])
def test_mistakes_end_the_process(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(arguments)


def test_plaintext_stays_on_loopback() -> None:
    with pytest.raises(PlaintextRefused):
        parse_settings(["--address=0.0.0.0:0", *REQUIRED[1:]])
    assert parse_settings(["--address=0.0.0.0:0", "--allow-insecure", *REQUIRED[1:]]).edge.allow_insecure
