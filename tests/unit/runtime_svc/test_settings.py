"""The command line."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from edge.access.principal import Principal, Scope
from edge.config import LocalListener
from edge.errors import AddressInvalid, OptionsInvalid, PlaintextRefused
from edge.logs import LogConfig
from edge.memory import measure_memory
from runtime_svc.bundles.grpc_source import CompilerEndpoint
from runtime_svc.engine.request import StallTimeouts
from runtime_svc.settings import parse_settings

REQUIRED = ["--address=127.0.0.1:0", "--compiler=127.0.0.1:7001", "--cache=cache"]


def test_defaults() -> None:
    settings = parse_settings(REQUIRED[:2], {"KILN_RUNTIME_CACHE": "cache"})
    assert settings.store is None
    assert settings.cache == Path("cache").absolute()
    assert settings.num_cores >= 1
    assert (settings.target, settings.threads_per_core, settings.verify_always) == ("cpu", 1, False)
    assert settings.warm_threads is None
    assert settings.state == settings.cache
    assert settings.deployments_file is None
    assert settings.capture_directory is None
    assert settings.memory_bytes == int(measure_memory() * 0.8)
    assert settings.compiler == CompilerEndpoint("127.0.0.1:7001")


TLS = ("127.0.0.1:7001", Path("ca.pem"), Path("c.pem"), Path("k.pem"))


@pytest.mark.parametrize(
    ("arguments", "attribute", "value"),
    [
        ("--bundle-store=store", "store", Path("store").absolute()),
        ("--verify=always", "verify_always", True),
        ("--target=trn2", "target", "trn2"),
        ("--cores=8", "num_cores", 8),
        ("--threads-per-core=2", "threads_per_core", 2),
        ("--warm-threads=4", "warm_threads", 4),
        ("--state=state", "state", Path("state").absolute()),
        ("--memory=3GiB", "memory_bytes", 3 << 30),
        ("--deployments=deployments.yaml", "deployments_file", Path("deployments.yaml").absolute()),
        ("--capture-directory=captures", "capture_directory", Path("captures").absolute()),
        ("--follow-interval=0.5", "follow_interval_s", 0.5),
        ("--compiler-ca=ca.pem --compiler-certificate=c.pem --compiler-key=k.pem", "compiler", CompilerEndpoint(*TLS)),
        ("--queue-capacity=3", "queue_capacity", 3),
        ("--stream-capacity=5", "stream_capacity", 5),
        ("--max-chunk-tokens=32", "engine.chunks.max_tokens", 32),
        ("--no-async-scheduling", "async_scheduling", False),
        ("--stall-timeout=4 --max-stall-timeout=40", "engine.stall_timeouts", StallTimeouts(4.0, 40.0)),
        ("--metrics-address=127.0.0.1:9", "edge.metrics_address", "127.0.0.1:9"),
        ("--max-connection-age=60", "edge.max_connection_age_s", 60),
        ("--log-level=debug", "logs.level", "debug"),
        ("--log-file=/r --log-file-size=1MiB --log-file-backups=2", "logs", LogConfig("info", Path("/r"), 1 << 20, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("-") else "",
)
def test_options_are_read(arguments: str, attribute: str, value: object) -> None:
    assert attrgetter(attribute)(parse_settings([*REQUIRED, *arguments.split()], {})) == value


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


def test_adapters_have_addresses_like_the_gateways() -> None:
    given = [*REQUIRED, "--engine-adapter=team/a=b:v2=127.0.0.1:1", "--engine-adapter=c=127.0.0.1:2"]
    settings = parse_settings(given, {})
    assert settings.engine_adapters == (("team/a=b:v2", "127.0.0.1:1"), ("c", "127.0.0.1:2"))
    assert settings.edge.side_addresses == ("127.0.0.1:1", "127.0.0.1:2")
    environment = {"KILN_RUNTIME_ENGINE_ADAPTER": "a=127.0.0.1:1,c=127.0.0.1:2"}
    assert parse_settings(REQUIRED, environment).engine_adapters == (("a", "127.0.0.1:1"), ("c", "127.0.0.1:2"))
    for text in ("a", "=127.0.0.1:1", "127.0.0.1:1", "a=here"):
        with pytest.raises(OptionsInvalid, match=r"engine-adapter.*accepted: NAME=HOST:PORT"):
            parse_settings([*REQUIRED, f"--engine-adapter={text}"], {})
    with pytest.raises(PlaintextRefused):
        parse_settings([*REQUIRED, "--engine-adapter=a=0.0.0.0:1"], {})
    gateway = ["--allow-insecure", "--gateway-address=127.0.0.1:3"]
    with pytest.raises(OptionsInvalid, match=r"engine-adapter.*accepted: HOST:PORT on loopback"):
        parse_settings([*REQUIRED, *gateway, "--engine-adapter=a=0.0.0.0:1"], {})


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


def test_a_runtime_needs_a_compiler_or_a_directory_of_bundles() -> None:
    settings = parse_settings([REQUIRED[0], REQUIRED[2], "--bundles=b", "--bundles=/c"], {})
    assert settings.compiler is None
    assert settings.bundles == (Path("b").absolute(), Path("/c"))
    with pytest.raises(OptionsInvalid, match="compiler, bundles: got neither"):
        parse_settings([REQUIRED[0], REQUIRED[2]], {})
