"""Fetched checkpoints are whole, are those that were planned with, and come from where the operator allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from filelock import FileLock

from bundle.errors import ResourcesShort
from compiler_svc.remote import fetching
from compiler_svc.remote.errors import ModelFetchFailed
from compiler_svc.remote.fetching import fetch_outline, fetch_whole, measure_fetched, remove_unfinished
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.errors import CheckpointInvalid, CheckpointNotFound
from tests.checkpoints.headers import LLAMA_1B, write_headers
from tests.checkpoints.random_weights import write_checkpoint

PREFIXES = ("memory://", "file:///")


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture(params=["file", "memory"])
def upload(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], str]:
    """Takes a checkpoint to where a URL names it; returns the URL."""

    def upload(path: Path) -> str:
        if request.param == "file":
            return f"file://{path}"
        url = f"memory://{tmp_path.name}/{path.name}"
        file_system, place = fsspec.url_to_fs(url)
        for file in path.iterdir():
            if file.is_file():
                file_system.pipe(f"{place}/{file.name}", file.read_bytes())
        return url

    return upload


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_outline_then_whole(upload: Callable[[Path], str], original: Path, kept: Path) -> None:
    (original / "optimizer.pt").write_bytes(b"not of the checkpoint")
    (original / "pytorch_model.bin").write_bytes(b"safetensors are preferred")
    url = upload(original)
    outline = Checkpoint.open(fetch_outline(url, PREFIXES, kept))
    expected = Checkpoint.open(original)
    shapes = {name: (header.dtype, header.shape) for name, header in expected.tensors.items()}
    assert {name: (header.dtype, header.shape) for name, header in outline.tensors.items()} == shapes
    assert outline.config == expected.config
    (weights,) = outline.files
    assert weights.stat().st_size == expected.files[0].stat().st_size
    assert weights.read_bytes() != expected.files[0].read_bytes()

    whole = fetch_whole(url, outline.path.name, PREFIXES, kept)
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    assert contents(whole) == {name: (original / name).read_bytes() for name in names}
    assert measure_fetched(kept, outline.path.name) == 0


def test_chat_templates_in_their_folder(original: Path, tmp_path: Path, kept: Path) -> None:
    (original / "additional_chat_templates").mkdir()
    for name in ("rag.jinja", "notes.txt"):
        (original / "additional_chat_templates" / name).write_text(name)
    url = f"file://{original}"
    outline = fetch_outline(url, PREFIXES, kept)
    assert Checkpoint.open(outline).chat_templates == {"rag": "rag.jinja"}
    whole = fetch_whole(url, outline.name, PREFIXES, kept)
    assert [path.name for path in (whole / "additional_chat_templates").iterdir()] == ["rag.jinja"]
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (original / "additional_chat_templates" / "rag.jinja").unlink()
    (original / "additional_chat_templates" / "rag.jinja").symlink_to(secret)
    with pytest.raises(CheckpointInvalid, match="a link out of the accepted URLs"):
        fetch_outline(url, (url,), kept)


def test_an_outline_takes_the_room_of_headers(tmp_path: Path, kept: Path) -> None:
    """Of 2.5 GB of weights."""
    path = fetch_outline(f"file://{write_headers(tmp_path / 'large', LLAMA_1B)}", PREFIXES, kept)
    files = [file.stat() for file in path.glob("*.safetensors")]
    assert sum(file.st_size for file in files) > 2_400_000_000
    assert sum(file.st_blocks * 512 for file in files) < 1_000_000
    assert len(Checkpoint.open(path).tensors) == 146


def test_a_pickle_is_fetched_for_the_build_only(upload: Callable[[Path], str], original: Path, kept: Path) -> None:
    (original / "model.safetensors").unlink()
    (original / "pytorch_model.bin").write_bytes(b"pickle")
    url = upload(original)
    outline = fetch_outline(url, PREFIXES, kept)
    assert (outline / "pytorch_model.bin").read_bytes() == bytes(6)
    assert (fetch_whole(url, outline.name, PREFIXES, kept) / "pytorch_model.bin").read_bytes() == b"pickle"


def test_files_of_an_index(upload: Callable[[Path], str], tmp_path: Path, kept: Path) -> None:
    original = write_headers(tmp_path / "sharded", LLAMA_1B | {"hidden_size": 64, "intermediate_size": 64})
    (original / "model-99999-of-00004.safetensors").write_bytes(b"of another export")
    url = upload(original)
    whole = fetch_whole(url, fetch_outline(url, PREFIXES, kept).name, PREFIXES, kept)
    shards = {f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)}
    assert set(contents(whole)) == {"config.json", "model.safetensors.index.json", *shards}


def test_what_has_changed_since_is_not_fetched(
    upload: Callable[[Path], str], original: Path, tmp_path: Path, kept: Path
) -> None:
    url = upload(original)
    key = fetch_outline(url, PREFIXES, kept).name
    write_checkpoint(tmp_path / "other" / "tiny", seed=1)
    (original / "model.safetensors").write_bytes((tmp_path / "other/tiny/model.safetensors").read_bytes())
    upload(original)
    with pytest.raises(ModelFetchFailed, match="it has changed since the compile was accepted"):
        fetch_whole(url, key, PREFIXES, kept)
    assert fetch_outline(url, PREFIXES, kept).name != key
    assert not (kept / key).exists()


def test_what_was_fetched_is_not_fetched_again(original: Path, kept: Path) -> None:
    url = f"file://{original}"
    key = fetch_outline(url, PREFIXES, kept).name
    whole = fetch_whole(url, key, PREFIXES, kept)
    (original / "model.safetensors").unlink()
    assert fetch_whole(url, key, PREFIXES, kept) == whole


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", ""])
def test_no_checkpoint(upload: Callable[[Path], str], original: Path, kept: Path, missing: str) -> None:
    if missing:
        (original / missing).unlink()
    url = upload(original) + ("" if missing else "/absent")
    with pytest.raises(CheckpointNotFound, match=r"no config\.json|no weights|no such directory"):
        fetch_outline(url, PREFIXES, kept)


def test_links_out_of_the_prefix(tmp_path: Path, kept: Path) -> None:
    original = write_checkpoint(tmp_path / "models" / "tiny")
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (original / "README.md").symlink_to(secret)
    prefixes = (f"file://{tmp_path}/models",)
    with pytest.raises(CheckpointInvalid, match=r"README\.md: got a link out of the accepted URLs"):
        fetch_outline(f"file://{original}", prefixes, kept)
    linked = tmp_path / "models" / "linked"
    linked.symlink_to(write_checkpoint(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointInvalid, match="a link out of the accepted URLs"):
        fetch_outline(f"file://{linked}", prefixes, kept)
    (original / "README.md").unlink()
    (original / "README.md").symlink_to(original / "config.json")
    assert (fetch_outline(f"file://{original}", prefixes, kept) / "README.md").is_file()


def test_a_text_that_is_too_large(original: Path, kept: Path) -> None:
    with (original / "tokenizer.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json: got 67108865 bytes"):
        fetch_outline(f"file://{original}", PREFIXES, kept)


def test_headers_that_are_too_large_for_a_plan(original: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_OUTLINE_BYTES", 1000)
    with pytest.raises(ModelFetchFailed, match="more than 1000 bytes"):
        fetch_outline(f"file://{original}", PREFIXES, kept)
    assert not list(kept.glob("outlines/[!.]*"))


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../secret"}}'])
def test_a_broken_index_is_named_as_that_of_a_directory(tmp_path: Path, kept: Path, index: str) -> None:
    original = write_headers(tmp_path / "sharded", LLAMA_1B | {"hidden_size": 64, "intermediate_size": 64})
    (original / "model.safetensors.index.json").write_text(index)
    path = fetch_outline(f"file://{original}", PREFIXES, kept)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(path)


def test_no_room(original: Path, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{original}"
    key = fetch_outline(url, PREFIXES, kept).name
    usage: Any = fetching.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(ResourcesShort, match="disk space"):
        fetch_whole(url, key, PREFIXES, kept)


def test_a_file_that_ends_early_leaves_nothing(original: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{original}"
    key = fetch_outline(url, PREFIXES, kept).name
    checkpoint = fetching.list_checkpoint(url, PREFIXES)
    monkeypatch.setattr(fetching, "list_checkpoint", lambda *_: checkpoint)
    (original / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(ModelFetchFailed, match=r"OSError: the file ends \d+ bytes early"):
        fetch_whole(url, key, PREFIXES, kept)
    assert [path.name for path in kept.iterdir() if path.is_dir()] == ["outlines"]


def test_only_what_no_fetch_holds_is_removed(kept: Path) -> None:
    for name in ("a", "b"):
        (kept / f".{name}.part").mkdir(parents=True)
        (kept / f".{name}.part" / "model.safetensors").write_text(json.dumps(name))
    with FileLock(kept / ".a.lock"):
        assert measure_fetched(kept, "a") == 3
        remove_unfinished(kept)
    assert [path.name for path in kept.glob("*.part")] == [".a.part"]
