"""Where the values of options come from, and what every mistake is called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edge.errors import OptionsInvalid
from edge.option_sources import MAX_FILE_BYTES, read_options, variable_of
from edge.options import COUNT, FLAG, PATH, SECONDS, TEXT, Option, list_options, option, option_class, section


@option_class()
class Own:
    """A part of the options."""

    follow_interval_s: float = option(SECONDS, "pause", default=5.0)
    is_open: bool = option(FLAG, "plaintext", name="allow-insecure", default=False)


@option_class(kw_only=True)
class Options:
    """Options of each kind."""

    cores: int = option(COUNT, "logical cores", default=1)
    own: Own = section(Own)
    model_root: tuple[Path, ...] = option(PATH, "100% of checkpoints", default=(), is_repeatable=True)
    database: str | None = option(TEXT, "URL", default=None, default_text="a file")
    workers: int = option(COUNT, "processes", derive=lambda given: 2 * given.cores, default_text="twice the cores")


OPTIONS = list_options(Options)


def read(arguments: list[str] = [], environment: dict[str, str] = {}) -> dict[str, Any]:  # noqa: B006 - never changed
    values = vars(read_options("runtime", Options, arguments, environment))
    own = vars(values.pop("own"))
    return {**values, **own}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return f"--config={path}"


def test_defaults() -> None:
    own = {"follow_interval_s": 5.0, "is_open": False}
    assert read() == {"cores": 1, "model_root": (), "database": None, "workers": 2, **own}


@pytest.mark.parametrize(
    ("row", "attribute"),
    list(zip(OPTIONS, ["cores", "follow_interval_s", "is_open", "model_root", "database", "workers"], strict=True)),
    ids=[row.name for row in OPTIONS],
)
def test_every_source_sets_every_option_and_the_first_one_wins(row: Option, attribute: str, tmp_path: Path) -> None:
    texts = ("true", "false", "true") if row.domain is FLAG else ("3", "2", "7")
    wanted = [(row.domain.parse(text),) if row.is_repeatable else row.domain.parse(text) for text in texts]
    config = write(tmp_path, f"{row.name}: {texts[0]}")
    environment = {variable_of("runtime", row.name): texts[1]}
    argument = f"--{row.name}" if row.domain is FLAG else f"--{row.name}={texts[2]}"
    values = [read([config]), read([config], environment), read([config, argument], environment)]
    assert [value[attribute] for value in values] == wanted
    others = [{key: value[key] for key in value if key not in (attribute, "workers")} for value in values]
    assert others[0] == others[1] == others[2]


def test_a_default_follows_from_other_options() -> None:
    assert read(["--cores=3"])["workers"] == 6
    assert read(["--cores=3", "--workers=1"])["workers"] == 1


def test_a_flag_can_be_turned_off_again(tmp_path: Path) -> None:
    config = write(tmp_path, "allow-insecure: true")
    assert read([config])["is_open"]
    assert not read([config, "--no-allow-insecure"])["is_open"]


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "cores: 4").partition("=")[2]
    assert read([], {"KILN_RUNTIME_CONFIG": path})["cores"] == 4
    assert read([], {"KILN_RUNTIME_CONFIG": ""})["cores"] == 1


def test_several_values(tmp_path: Path) -> None:
    config = write(tmp_path, "model-root: [/a, /b]")
    assert read([config])["model_root"] == (Path("/a"), Path("/b"))
    assert read([config], {"KILN_RUNTIME_MODEL_ROOT": "/c:/d"})["model_root"] == (Path("/c"), Path("/d"))
    assert read([config, "--model-root=/e", "--model-root=/f"])["model_root"] == (Path("/e"), Path("/f"))


def test_an_empty_variable_is_unset_and_those_of_others_are_left_alone() -> None:
    # Kubernetes sets the last two for a service that is called kiln-runtime.
    others = {"KILN_RUNTIME_PORT": "tcp://10.0.0.1:1", "KILN_RUNTIME_SERVICE_HOST": "10.0.0.1"}
    assert read([], {"KILN_RUNTIME_CORES": ""} | others) == read()


def test_json_and_an_empty_file(tmp_path: Path) -> None:
    assert read([write(tmp_path, '{"cores": 4, "model-root": ["/a"], "database": "10"}')])["database"] == "10"
    assert read([write(tmp_path, "# nothing\n")]) == read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cores: 2\ncorse: 3", "options.yaml:2: got 'corse'; accepted: cores, if that is meant"),
        ("zzz: 3", "options.yaml:1: got 'zzz'; accepted: names of options"),
        ("--cores: 3", "options.yaml:1: got '--cores'; accepted: cores, if that is meant"),
        ("config: other.yaml", "options.yaml:1: got 'config'"),
        ("cores: 2\n\ncores: 2", "options.yaml:3: got cores, as in line 1; accepted: every name once"),
        ("a: 1\na: 2", "options.yaml:2: got 'a'"),
        ("cores: many", "options.yaml:1: cores: got 'many'; accepted: an integer of at least 1"),
        ("cores: [2]", "options.yaml:1: cores: got a list; accepted: an integer"),
        ("cores: {a: 1}", "options.yaml:1: cores: got a mapping"),
        ("cores:", "options.yaml:1: cores: got null"),
        ("database: ''", "options.yaml:1: database: got ''; accepted: text"),
        ("allow-insecure: on", "options.yaml:1: allow-insecure: got 'on'; accepted: true or false"),
        ("model-root: [[a]]", "options.yaml:1: model-root: got a list; accepted: a path, or a list of such"),
        ("? [a]\n: 2", "options.yaml:1: got 'a list or mapping'"),
        ("[cores]", "options.yaml:1: got no mapping; accepted: names and values"),
        ("cores: 'two", "accepted: YAML or JSON"),
        ("cores: *unknown", "accepted: YAML or JSON"),
        ("#" * MAX_FILE_BYTES + "#", "got a larger file; accepted: at most"),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionsInvalid) as caught:
        read([write(tmp_path, text)])
    assert message in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(OptionsInvalid, match=r"/absent\.yaml: got No such file or directory; accepted: a file"):
        read(["--config=/absent.yaml"])


def test_mistakes_in_variables_and_arguments_are_named() -> None:
    with pytest.raises(OptionsInvalid, match=r"^KILN_RUNTIME_CORES: got 'x'; accepted: an integer of at least 1$"):
        read([], {"KILN_RUNTIME_CORES": "x"})
    with pytest.raises(OptionsInvalid, match=r"^--follow-interval: got '0'; accepted: a number above 0$"):
        read(["--follow-interval=0"])
    with pytest.raises(OptionsInvalid, match="KILN_RUNTIME_MODEL_ROOT: got ''; accepted: a path"):
        read([], {"KILN_RUNTIME_MODEL_ROOT": "/a:"})


def test_one_answer_names_every_mistake(tmp_path: Path) -> None:
    config = write(tmp_path, "corse: 1\ndatabase: [1]")
    with pytest.raises(OptionsInvalid) as caught:
        read([config, "--cores=0"], {"KILN_RUNTIME_FOLLOW_INTERVAL": "-1"})
    assert len(caught.value.violations) == 4


def test_a_required_option_may_come_from_anywhere(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Required:
        address: str = option(TEXT, "where")

    with pytest.raises(OptionsInvalid, match="--address: got nothing; accepted: text, by --address, KILN_PROBE_ADDRES"):
        read_options("probe", Required, [], {})
    assert read_options("probe", Required, [], {"KILN_PROBE_ADDRESS": "a"}).address == "a"
    assert read_options("probe", Required, [write(tmp_path, "address: b")], {}).address == "b"


def test_help_lists_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for one in OPTIONS:
        assert f"--{one.name}" in text
        assert one.help in text
    assert "default: 5 " in text
    assert "default: a file" in text


def test_unknown_arguments_end_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--corse=1"])
    assert "unrecognized arguments: --corse=1" in capsys.readouterr().err
