import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bundle.digest import sha256_file
from compiler_svc.weights.checkpoint import Checkpoint, compute_checkpoint_digest
from compiler_svc.weights.errors import CheckpointInvalid, CheckpointNotFound
from compiler_svc.weights.tensors import TensorReader
from tests.checkpoints.forms import FORMS

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.weight": torch.arange(4).to(torch.bfloat16),
    "c": torch.tensor([7], dtype=torch.int64),
}


def name_shard(number: int) -> str:
    return f"model-{number + 1:05}-of-00003.safetensors"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"]})
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_headers_and_tensors(directory: Path, form: str) -> None:
    FORMS[form](directory, TENSORS)
    checkpoint = Checkpoint.open(directory)
    assert (checkpoint.generation_config, checkpoint.tokenizer_files, checkpoint.chat_templates) == ({}, (), {})
    assert {name: (header.dtype, header.shape) for name, header in checkpoint.tensors.items()} == {
        "a.weight": ("float32", (2, 3)),
        "b.weight": ("bfloat16", (4,)),
        "c": ("int64", (1,)),
    }
    with TensorReader(checkpoint) as reader:
        for name, tensor in TENSORS.items():
            read = reader.read(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)


def test_safetensors_are_preferred_to_pickles(directory: Path) -> None:
    FORMS["pickle"](directory, TENSORS)
    FORMS["safetensors"](directory, TENSORS)
    assert [file.name for file in Checkpoint.open(directory).files] == ["model.safetensors"]


def test_files_that_describe_it_are_taken_along(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    FORMS["safetensors"](directory, TENSORS)
    described = {
        "LICENSE": "text/plain",
        "LICENSE.txt": "text/plain",
        "NOTICE": "text/plain",
        "README.md": "text/markdown",
        "config.json": "application/json",
        "generation_config.json": "application/json",
    }
    for name in (*described, "readme", "MY_LICENSE", "README of mine", "LICENSE\n", "optimizer.pt"):
        if name != "config.json":
            (directory / name).write_text("{}")
    (directory / "LICENSES").mkdir()
    files = Checkpoint.open(directory).describing_files
    assert {file.path.name: file.media_type for file in files} == described
    assert [file.path for file in files] == [directory / name for name in described]
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.touch()
    (directory / "README.secret").symlink_to(secret)
    with pytest.raises(CheckpointInvalid, match=r"README\.secret.*out of the model roots"):
        Checkpoint.open(directory, roots=[directory])


def test_generation_config_and_tokenizer(directory: Path) -> None:
    FORMS["safetensors"](directory, TENSORS)
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 3]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_json(directory / name, {})
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.generation_config == {"eos_token_id": [2, 3]}
    assert [file.name for file in checkpoint.tokenizer_files] == ["tokenizer.json", "tokenizer_config.json"]


def test_no_directory_config_or_weights(directory: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"has no weights.*model\.safetensors, .*pytorch_model\.bin"):
        Checkpoint.open(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        Checkpoint.open(directory)
    with pytest.raises(CheckpointNotFound, match="accepted: a Hugging Face model directory"):
        Checkpoint.open(directory / "absent")
    with pytest.raises(CheckpointNotFound, match=r"got absent/model \(no such directory\)"):
        Checkpoint.open(directory / "absent/model", roots=[directory])


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\xff"])
def test_broken_config(directory: Path, text: str) -> None:
    FORMS["safetensors"](directory, TENSORS)
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointInvalid, match=r"accepted: .*(JSON object|UTF-8)") as caught:
        Checkpoint.open(directory)
    assert caught.value.subject == "config.json"


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
@pytest.mark.parametrize("kept", [0, 4, 20, 0.5, 0.999])
def test_truncated_weights(directory: Path, form: str, kept: float) -> None:
    FORMS[form](directory, TENSORS)
    (file,) = Checkpoint.open(directory).files
    data = file.read_bytes()
    file.write_bytes(data[: int(kept if kept >= 1 else kept * len(data))])
    with pytest.raises(CheckpointInvalid, match=r"broken file.*accepted: ") as caught:
        Checkpoint.open(directory)
    assert caught.value.subject == file.name


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/model.safetensors", "", "..", "x.bin", "m\0.safetensors", 3, None],
)
def test_index_names_a_file_elsewhere(directory: Path, name: object) -> None:
    save_file(TENSORS, directory.parent / "model.safetensors")
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"a.weight": name}})
    with pytest.raises(CheckpointInvalid, match=r"weight_map\[a.weight\].*accepted: the name of a \.safetensors file"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_map(directory: Path, weight_map: object) -> None:
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CheckpointInvalid, match="tensor names with file names"):
        Checkpoint.open(directory)


def test_links_stay_within_the_roots(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    FORMS["safetensors"](elsewhere, TENSORS)
    (directory / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    assert Checkpoint.open(directory, roots=[directory, elsewhere]).tensors
    with pytest.raises(CheckpointInvalid, match="a link out of the model roots"):
        Checkpoint.open(directory, roots=[directory])


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("__import__('pathlib').Path('executed').touch()",)


def test_pickles_run_no_code(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    torch.save({"a": Payload()}, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointInvalid, match="accepted: a state dict of plain tensors"):
        Checkpoint.open(directory)
    assert not (directory / "executed").exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 3}, {1: torch.ones(1)}, torch.ones(2)])
def test_pickles_of_something_else(directory: Path, content: object) -> None:
    torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointInvalid, match="accepted: a state dict of plain tensors"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "old-1.bin"])
def test_pickles_from_before_torch_1_6_are_refused_with_the_line_that_converts_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    torch.save(TENSORS, directory / name, _use_new_zipfile_serialization=False)
    if name != "pytorch_model.bin":
        write_json(directory / "pytorch_model.bin.index.json", {"weight_map": dict.fromkeys(TENSORS, name)})
    with pytest.raises(CheckpointInvalid, match=r"a file in the form before torch 1\.6") as caught:
        Checkpoint.open(directory)
    (line,) = re.findall("`python -c '(.*)'`", str(caught.value))
    monkeypatch.chdir(directory)
    exec(line)
    with TensorReader(Checkpoint.open(directory)) as reader:
        assert all(torch.equal(reader.read(one), tensor) for one, tensor in TENSORS.items())


def test_file_that_changed_after_opening(directory: Path) -> None:
    FORMS["safetensors"](directory, TENSORS)
    checkpoint = Checkpoint.open(directory)
    save_file({"a.weight": torch.ones(1)}, directory / "model.safetensors")
    with TensorReader(checkpoint) as reader, pytest.raises(CheckpointInvalid, match="changed since it was opened"):
        reader.read("b.weight")
    with TensorReader(checkpoint) as reader, pytest.raises(CheckpointInvalid, match="changed since it was opened"):
        reader.read("a.weight")


def test_digest_follows_content_not_place(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def digest(path: Path) -> str:
        return compute_checkpoint_digest(Checkpoint.open(path), sha256_file)

    FORMS["sharded-safetensors"](directory, TENSORS)
    copy = tmp_path_factory.mktemp("copy")
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("not part of it")
    original = digest(directory)
    assert digest(copy) == original
    save_file({"c": torch.tensor([8])}, copy / name_shard(2))
    assert digest(copy) != original
    FORMS["sharded-safetensors"](copy, TENSORS)
    assert digest(copy) == original
    write_json(copy / "config.json", {"architectures": ["LlamaForCausalLM"], "rope_theta": 5.0})
    assert digest(copy) != original


def test_all_missing_files_are_named_at_once(directory: Path) -> None:
    FORMS["sharded-safetensors"](directory, TENSORS)
    for number in (0, 2):
        (directory / name_shard(number)).unlink()
    with pytest.raises(CheckpointInvalid) as caught:
        Checkpoint.open(directory)
    assert [one.field for one in caught.value.violations] == [name_shard(0), name_shard(2)]


@pytest.mark.parametrize("form", ["sharded-safetensors", "sharded-pickle"])
def test_tensors_elsewhere_than_the_index_says_are_named_at_once(directory: Path, form: str) -> None:
    FORMS[form](directory, TENSORS)
    (index,) = directory.glob("*.index.json")
    files = list(json.loads(index.read_text())["weight_map"].values())
    write_json(index, {"weight_map": {"a.weight": files[1], "b.weight": files[1], "c": files[0]}})
    with pytest.raises(CheckpointInvalid) as caught:
        Checkpoint.open(directory)
    assert [(one.field, one.value) for one in caught.value.violations] == [
        ("a.weight", f"not in {files[1]}"),
        ("c", f"not in {files[0]}"),
    ]


def test_tensors_that_the_index_leaves_out_belong_to_the_checkpoint(directory: Path) -> None:
    FORMS["sharded-safetensors"](directory, TENSORS)
    save_file({"a.weight": torch.ones(1), "d": torch.ones(5)}, directory / name_shard(1))
    index = directory / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"a.weight": name_shard(0), "d": name_shard(1)}})
    tensors = Checkpoint.open(directory).tensors
    assert {name: (header.file.name, header.shape) for name, header in tensors.items()} == {
        "a.weight": (name_shard(0), (2, 3)),
        "d": (name_shard(1), (5,)),
    }
    save_file({"d": torch.ones(5), "e": torch.ones(2)}, directory / name_shard(1))
    assert Checkpoint.open(directory).tensors["e"].file.name == name_shard(1)
