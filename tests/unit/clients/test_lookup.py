"""What a person means by MODEL, as far as that does not take a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from kiln_client.cli.local.lookup import Checkpoint, HubModel, find_checkpoint, name_of
from kiln_client.errors import ModelNotFound


def make_checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_path_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path / "Llama Tuned")
    monkeypatch.chdir(tmp_path)
    for text in (str(path), "./Llama Tuned", f"../{tmp_path.name}/Llama Tuned"):
        assert find_checkpoint(text, []) == Checkpoint("llama-tuned", path)


def test_a_path_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "models" / "org" / "llama")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for text in ("./org/llama", "./empty", "/nowhere"):
        with pytest.raises(ModelNotFound) as caught:
            find_checkpoint(text, [tmp_path / "models"])
        assert f"got '{text}'; accepted: a directory with a config.json" in str(caught.value)


def test_a_name_with_a_slash_is_below_a_root_or_of_the_hub(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "second" / "org" / "llama")
    roots = [tmp_path / "first", tmp_path / "second"]
    assert find_checkpoint("org/llama", roots) == Checkpoint("llama", path)
    assert find_checkpoint("org/Llama-3.2-1B", roots) == HubModel("org/Llama-3.2-1B")


def test_a_directory_here_comes_behind_the_roots_and_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_checkpoint(tmp_path / "org" / "llama")
    deep = make_checkpoint(tmp_path / "examples" / "models" / "tiny")
    (tmp_path / "org" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    roots = [tmp_path / "models"]
    assert find_checkpoint("org/llama", roots) == find_checkpoint("org/llama/", roots) == Checkpoint("llama", here)
    assert find_checkpoint("examples/models/tiny", roots) == Checkpoint("tiny", deep)
    assert find_checkpoint("org/empty", roots) == HubModel("org/empty")
    below = make_checkpoint(tmp_path / "models" / "org" / "llama")
    assert find_checkpoint("org/llama", roots) == Checkpoint("llama", below)


@pytest.mark.parametrize(
    ("cached", "name"),
    [
        ("models--meta-llama--Llama-3.2-1B", "llama-3.2-1b"),
        ("models--gpt2", "gpt2"),
        ("models--org--My_Tuned.Model-v2", "my_tuned.model-v2"),
    ],
)
def test_a_snapshot_of_the_hubs_cache_is_named_by_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: str, name: str
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = make_checkpoint(tmp_path / cached / "snapshots" / commit)
    monkeypatch.chdir(path)
    for text in (str(path), ".", f"../{commit}/"):
        assert find_checkpoint(text, []) == Checkpoint(name, path)
    elsewhere = make_checkpoint(tmp_path / "my" / "snapshots" / "last")
    assert find_checkpoint(str(elsewhere), []) == Checkpoint("last", elsewhere)


def test_only_the_compiler_knows_what_has_no_slash(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "llama")
    for text in ("llama", "llama:v2", "llama@prod", "sha256:0"):
        assert find_checkpoint(text, [tmp_path]) is None


@pytest.mark.parametrize("text", ["a/b/c", "org/..", "org/", "org/a b"])
def test_what_is_nothing(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find_checkpoint(text, [tmp_path])
    (violation,) = caught.value.fields
    assert f"the name of a directory below {tmp_path}" in violation.description
    assert "ORG/NAME" in violation.description


def test_a_name_does_not_leave_its_root(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "outside")
    with pytest.raises(ModelNotFound):
        find_checkpoint("models/../../outside", [tmp_path / "root"])


def test_the_roots_of_a_checkpoint_are_those_of_its_links(tmp_path: Path) -> None:
    """The Hub's own cache keeps the files of a snapshot elsewhere, behind links."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "0a1b").write_text("{}")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(blobs / "0a1b")
    (tmp_path / "here").symlink_to(snapshot)
    found = find_checkpoint(str(tmp_path / "here"), [])
    assert isinstance(found, Checkpoint)
    assert (found.name, found.path) == ("here", snapshot)
    assert found.roots == [snapshot, blobs]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama-3.2-1B", "llama-3.2-1b"),
        ("my model (2)", "my-model-2"),
        ("_x", "x"),
        ("…", "model"),
        ("a" * 90, "a" * 56),
    ],
)
def test_names_are_those_of_bundles_and_deployments(text: str, name: str) -> None:
    assert name_of(text) == name


def test_a_gguf_file_is_a_checkpoint_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler may read that file alone, not the folder of downloads around it."""
    stored = tmp_path / "blobs/0f3a"
    stored.parent.mkdir()
    stored.touch()
    (tmp_path / "Tiny.Q4_0.gguf").symlink_to(stored)
    monkeypatch.chdir(tmp_path)
    for text in ("Tiny.Q4_0.gguf", "./Tiny.Q4_0.gguf", str(tmp_path / "Tiny.Q4_0.gguf")):
        found = find_checkpoint(text, ())
        assert isinstance(found, Checkpoint)
        assert (found.name, found.path, found.roots) == ("tiny.q4_0", stored, [stored])
    assert find_checkpoint("absent.gguf", ()) is None
