"""The command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.access.principal import Principal, Scope
from edge.config import LocalListener
from edge.errors import AddressInvalid, OptionsInvalid, PlaintextRefused
from edge.logs import LogConfig
from edge.memory import measure_memory
from runtime_svc.bundles.channel import CompilerEndpoint
from runtime_svc.engine.request import StallTimeouts
from runtime_svc.settings import parse_settings

REQUIRED = ["--address=127.0.0.1:0", "--compiler=127.0.0.1:7001", "--cache=cache"]


def test_defaults() -> None:
    settings = parse_settings(REQUIRED, {})
    assert settings.store is None
    assert settings.cache == Path("cache").absolute()
    assert settings.num_cores >= 1
    assert (settings.target, settings.threads_per_core, settings.verify_always) == ("cpu", 1, False)
    assert settings.state == settings.cache
    assert settings.deployments_file is None
    assert settings.capture_directory is None
    assert settings.memory_bytes == int(measure_memory() * 0.8)


def test_every_option_is_read() -> None:
    settings = parse_settings(
        [
            *REQUIRED,
            "--bundle-store=store",
            "--verify=always",
            "--target=trn2",
            "--cores=8",
            "--threads-per-core=2",
            "--state=state",
            "--memory=3GiB",
            "--deployments=deployments.yaml",
            "--capture-directory=captures",
            "--follow-interval=0.5",
            "--compiler-ca=ca.pem",
            "--compiler-certificate=c.pem",
            "--compiler-key=k.pem",
            "--queue-capacity=3",
            "--stream-capacity=5",
            "--max-chunk-tokens=32",
            "--no-async-scheduling",
            "--stall-timeout=4",
            "--max-stall-timeout=40",
            "--drain-timeout=1.5",
            "--log-level=debug",
            "--log-file=r.log",
            "--log-file-size=1MiB",
            "--log-file-backups=2",
            "--max-connection-age=60",
            "--metrics-address=127.0.0.1:9",
            "--tls-certificate=c.pem",
            "--tls-key=k.pem",
            "--tls-client-ca=ca.pem",
        ]
    )
    assert settings.store == Path("store").absolute()
    assert settings.verify_always
    assert (settings.target, settings.num_cores, settings.threads_per_core) == ("trn2", 8, 2)
    assert (settings.queue_capacity, settings.stream_capacity) == (3, 5)
    assert (settings.chunks.max_tokens, settings.async_scheduling) == (32, False)
    assert settings.stall_timeouts == StallTimeouts(4.0, 40.0)
    assert settings.state == Path("state").absolute()
    assert settings.memory_bytes == 3 << 30
    assert settings.deployments_file == Path("deployments.yaml").absolute()
    assert settings.capture_directory == Path("captures").absolute()
    assert settings.follow_interval_s == 0.5
    assert settings.compiler == CompilerEndpoint("127.0.0.1:7001", Path("ca.pem"), Path("c.pem"), Path("k.pem"))
    assert (settings.edge.drain_timeout_s, settings.logs) == (
        1.5,
        LogConfig("debug", Path("r.log").absolute(), 1 << 20, 2),
    )
    assert (settings.edge.max_connection_age_s, settings.edge.metrics_address) == (60, "127.0.0.1:9")
    assert settings.edge.tls is not None
    assert settings.edge.tls.client_ca_path == Path("ca.pem")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        REQUIRED[:2],
        [*REQUIRED, "--cores=0"],
        [*REQUIRED, "--verify=never"],
        [*REQUIRED, "--memory=0"],
        [*REQUIRED, "--memory=3GB"],
        [*REQUIRED, "--follow-interval=0"],
        [*REQUIRED, "--follow-interval=nan"],
        [*REQUIRED, "--compiler-certificate=c.pem"],
        [*REQUIRED, "--compiler-certificate=c.pem", "--compiler-key=k.pem"],
    ],
)
def test_mistakes_are_refused(arguments: list[str]) -> None:
    with pytest.raises(OptionsInvalid):
        parse_settings(arguments)


def test_plaintext_stays_on_loopback() -> None:
    with pytest.raises(PlaintextRefused):
        parse_settings(["--address=0.0.0.0:0", *REQUIRED[1:]])
    allowed = ["--allow-insecure", "--allow-anonymous"]
    assert parse_settings(["--address=0.0.0.0:0", *allowed, *REQUIRED[1:]]).edge.allow_insecure


def test_a_gateway_is_on_this_host() -> None:
    assert parse_settings(REQUIRED, {}).edge.local_listener is None
    listener = parse_settings([*REQUIRED, "--gateway-address=127.0.0.1:50054"], {}).edge.local_listener
    assert listener == LocalListener("127.0.0.1:50054", Principal("gateway", frozenset({Scope.INFER})))
    for address in ("0.0.0.0:50054", "[::]:50054", "192.168.1.7:1", "gateway:1"):
        with pytest.raises(OptionsInvalid, match=r"gateway-address.*accepted: HOST:PORT on loopback") as caught:
            parse_settings([*REQUIRED, "--allow-insecure", f"--gateway-address={address}"], {})
        assert address in str(caught.value)
    with pytest.raises(AddressInvalid):
        parse_settings([*REQUIRED, "--gateway-address=127.0.0.1:65536"], {})


def test_plaintext_to_the_compiler_stays_on_loopback() -> None:
    away = [REQUIRED[0], "--compiler=compiler.example:7001", REQUIRED[2]]
    with pytest.raises(PlaintextRefused, match=r"compiler\.example"):
        parse_settings(away)
    assert parse_settings([*away, "--allow-insecure"]).compiler == CompilerEndpoint(
        "compiler.example:7001", allow_insecure=True
    )
    endpoint = parse_settings([*away, "--compiler-ca=ca.pem"]).compiler
    assert endpoint is not None
    assert endpoint.ca_path == Path("ca.pem")


def test_the_environment_alone_is_enough() -> None:
    environment = {
        "KILN_RUNTIME_ADDRESS": "127.0.0.1:0",
        "KILN_RUNTIME_COMPILER": "127.0.0.1:7001",
        "KILN_RUNTIME_CACHE": "cache",
        "KILN_RUNTIME_MEMORY": "3GiB",
    }
    settings = parse_settings([], environment)
    assert settings.compiler == CompilerEndpoint("127.0.0.1:7001")
    assert settings.memory_bytes == 3 << 30


def test_a_runtime_needs_a_compiler_or_a_directory_of_bundles() -> None:
    settings = parse_settings([REQUIRED[0], REQUIRED[2], "--bundles=b", "--bundles=/c"], {})
    assert settings.compiler is None
    assert settings.bundles == (Path("b").absolute(), Path("/c"))
    with pytest.raises(OptionsInvalid, match="compiler, bundles: got neither"):
        parse_settings([REQUIRED[0], REQUIRED[2]], {})
