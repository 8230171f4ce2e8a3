"""`kiln pull` against a server that speaks the Hub's protocol."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints.random_weights import write_checkpoint
from tests.servers.command import KILN, python_environment
from tests.servers.hub import Hub, running_hub
from tests.service.clients.conftest import Outcome

_TIMEOUT_S = 60
ID = "kiln/random"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint as repositories have them: with its weights in another format, too."""
    path = write_checkpoint(tmp_path / "checkpoint")
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    (path / "logo.png").write_bytes(b"a picture")
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def pull(hub: Hub, home: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs `kiln pull` in a process of its own, because `huggingface_hub` reads its environment once."""

    def run(*words: str, as_json: bool = True, **variables: str) -> Outcome:
        environment = python_environment(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), **variables)
        command = [*KILN, "pull", *words, "--home", str(home), *(["--json"] if as_json else [])]
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return Outcome(result.returncode, result.stdout, result.stderr)

    return run


def test_downloads_what_a_checkpoint_needs_under_the_model_root(
    pull: Callable[..., Outcome], hub: Hub, checkpoint: Path, home: Path
) -> None:
    commit = hub.add(ID, checkpoint)
    outcome = pull(ID, "--yes")
    assert outcome.exit_code == 0, outcome.err
    path = home / "models" / ID
    assert (outcome.last["path"], outcome.last["revision"]) == (str(path), commit)
    names = {file.name for file in path.iterdir() if file.is_file()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert all((path / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)
    assert hub.downloads()[-1] == "config.json", "a directory with a config.json is whole"


def test_asks_and_downloads_nothing_twice(pull: Callable[..., Outcome], hub: Hub, checkpoint: Path) -> None:
    hub.add(ID, checkpoint)
    asked = pull(ID)
    assert (asked.exit_code, hub.downloads()) == (2, [])
    assert f"Download {ID}, " in asked.error["message"]
    assert pull(ID, "--yes").exit_code == 0
    hub.requests.clear()
    assert pull(ID).last["downloaded_bytes"] == 0
    assert hub.downloads() == []


def test_goes_on_where_a_download_broke_off(
    pull: Callable[..., Outcome], hub: Hub, checkpoint: Path, home: Path
) -> None:
    hub.add(ID, checkpoint)
    hub.fails_after = 4096
    broken = pull(ID, "--yes")
    assert broken.error["reason"] == "HUB_FAILED"
    assert not (home / "models" / ID / "config.json").exists()
    hub.fails_after = None
    hub.requests.clear()
    assert pull(ID, "--yes").exit_code == 0
    assert hub.downloads() == ["model.safetensors", "tokenizer.json", "config.json"], "generation_config.json is there"
    weights = "model.safetensors"
    assert not list((home / "models" / ID).rglob("*.incomplete")), "parts would fill the disk: nothing reads them again"
    assert (home / "models" / ID / weights).read_bytes() == (checkpoint / weights).read_bytes()


def test_takes_the_revision_and_the_model_root_that_are_named_and_shows_a_token(
    pull: Callable[..., Outcome], hub: Hub, checkpoint: Path, tmp_path: Path, home: Path
) -> None:
    hub.add(ID, checkpoint)
    tuned = write_checkpoint(tmp_path / "tuned", seed=1)
    commit = hub.add(ID, tuned, revision="tuned")
    hub.token = "hf_secret"
    words = (ID, "--revision", "tuned", "--yes", "--model-root", str(tmp_path / "root"))
    assert "a private one needs a token" in pull(*words).error["message"]
    outcome = pull(*words, "--token", "hf_secret")
    assert (outcome.last["revision"], outcome.last["path"]) == (commit, str(tmp_path / "root" / ID))
    assert (tmp_path / "root" / ID / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()
    assert pull(*words, HF_TOKEN="hf_secret").exit_code == 0
    assert not (home / "models").exists()


@pytest.mark.parametrize(
    ("words", "detail"),
    [
        (("kiln/nothing",), "the Hub has no such model"),
        ((ID, "--revision", "v9"), "it has no such revision"),
        (("no id at all",), "cannot be downloaded"),
    ],
    ids=["model", "revision", "id"],
)
def test_says_what_the_hub_lacks(
    pull: Callable[..., Outcome], hub: Hub, checkpoint: Path, words: tuple[str, ...], detail: str
) -> None:
    hub.add(ID, checkpoint)
    outcome = pull(*words, "--yes")
    assert (outcome.exit_code, outcome.error["reason"]) == (1, "HUB_FAILED")
    assert detail in outcome.error["message"]


def test_a_repository_without_a_config_is_no_checkpoint(pull: Callable[..., Outcome], hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "README.md").write_text("a data set")
    hub.add(ID, tmp_path / "other")
    assert "it has no config.json" in pull(ID, "--yes").error["message"]
