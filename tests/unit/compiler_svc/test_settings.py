from pathlib import Path

import pytest

from compiler_svc.settings import choose_lowering_memory, parse_settings
from edge.errors import OptionsInvalid, PlaintextRefused
from edge.memory import measure_memory

REQUIRED = ["--store", "s", "--cache", "c", "--model-root", "m"]
LOCAL = ["--address", "127.0.0.1:0", *REQUIRED]
GIB = 1 << 30


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = parse_settings([*LOCAL, "--model-root", "/n"])
    assert settings.store == tmp_path / "s"
    assert settings.database_url == f"sqlite:///{tmp_path}/s/kiln.db"
    assert settings.model_roots == (tmp_path / "m", Path("/n"))
    assert (settings.max_builds, settings.max_waiting) == (1, 16)
    assert settings.edge.tls is None
    assert settings.default_isa == "x86-64-v3", "of bundles that travel"


def test_a_database_elsewhere() -> None:
    url = "postgresql+psycopg://kiln@db/kiln"
    assert parse_settings([*LOCAL, "--database", url]).database_url == url


def test_golden_checks_take_free_cores_unless_they_may_take_none() -> None:
    for words, expected in (([], True), (["--golden-cores=free"], True), (["--golden-cores=none"], False)):
        assert parse_settings([*LOCAL, *words]).checks_on_cores is expected


@pytest.mark.parametrize(
    "arguments",
    [
        REQUIRED,
        ["--address", "127.0.0.1:0"],
        [*LOCAL, "--max-builds", "0"],
        [*LOCAL, "--tls-key", "key.pem"],
        [*LOCAL, "--log-level", "loud"],
        [*LOCAL, "--lowering-memory", "lots"],
        [*LOCAL, "--default-isa", "avx2"],
        [*LOCAL, "--golden-cores", "all"],
    ],
)
def test_a_command_line_that_makes_no_sense(arguments: list[str]) -> None:
    with pytest.raises(OptionsInvalid):
        parse_settings(arguments)


def test_lowerings_share_the_memory_and_never_get_too_little() -> None:
    assert choose_lowering_memory(64 * GIB, 4) == 12 * GIB
    assert choose_lowering_memory(8 * GIB, 8) == 4 * GIB


def test_memory_of_a_lowering() -> None:
    required = [*LOCAL, "--lowerings", "2", "--max-builds", "3"]
    assert parse_settings([*required, "--lowering-memory", "2GiB"]).lowering_memory_bytes == 2 * GIB
    assert parse_settings(required).lowering_memory_bytes == choose_lowering_memory(measure_memory(), 6)


def test_an_address_that_others_reach_needs_permission() -> None:
    with pytest.raises(PlaintextRefused):
        parse_settings(["--address", "0.0.0.0:7001", *REQUIRED])


def test_the_environment_alone_is_enough() -> None:
    environment = {
        "KILN_COMPILER_ADDRESS": "127.0.0.1:0",
        "KILN_COMPILER_STORE": "/s",
        "KILN_COMPILER_CACHE": "/c",
        "KILN_COMPILER_MODEL_ROOT": "/m:/n",
    }
    assert parse_settings([], environment).model_roots == (Path("/m"), Path("/n"))
