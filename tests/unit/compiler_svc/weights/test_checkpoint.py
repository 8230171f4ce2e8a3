import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bundle.digest import sha256_file
from compiler_svc.weights.checkpoint import Checkpoint, compute_checkpoint_digest
from compiler_svc.weights.errors import CheckpointInvalid, CheckpointNotFound
from compiler_svc.weights.tensors import TensorReader

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.weight": torch.arange(4).to(torch.bfloat16),
    "c": torch.tensor([7], dtype=torch.int64),
}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def write_safetensors(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")


def write_sharded_safetensors(directory: Path) -> None:
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, directory / f"model-{number}.safetensors")
    weight_map = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_pickle(directory: Path) -> None:
    torch.save(TENSORS, directory / "pytorch_model.bin")


def write_sharded_pickle(directory: Path) -> None:
    for number, name in enumerate(TENSORS):
        torch.save({name: TENSORS[name]}, directory / f"pytorch_model-{number}.bin")
    weight_map = {name: f"pytorch_model-{number}.bin" for number, name in enumerate(TENSORS)}
    write_json(directory / "pytorch_model.bin.index.json", {"weight_map": weight_map})


FORMATS = [write_safetensors, write_sharded_safetensors, write_pickle, write_sharded_pickle]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"]})
    return tmp_path


@pytest.mark.parametrize("write", FORMATS)
def test_headers_and_tensors(directory: Path, write: Any) -> None:
    write(directory)
    checkpoint = Checkpoint.open(directory)
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
    write_pickle(directory)
    write_safetensors(directory)
    assert [file.name for file in Checkpoint.open(directory).files] == ["model.safetensors"]


def test_files_that_describe_it_are_taken_along(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    write_safetensors(directory)
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


def test_json_tokenizer_and_template(directory: Path) -> None:
    write_safetensors(directory)
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 3]})
    write_json(directory / "tokenizer.json", {})
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]
    write_json(directory / "tokenizer_config.json", {"chat_template": templates})
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.generation_config == {"eos_token_id": [2, 3]}
    assert [file.name for file in checkpoint.tokenizer_files] == ["tokenizer.json", "tokenizer_config.json"]
    assert checkpoint.chat_templates == {"default": "{{ messages }}", "tool_use": "x"}
    (directory / "chat_template.jinja").write_text("{{ bos_token }}")
    assert Checkpoint.open(directory).chat_templates == {"default": "{{ bos_token }}"}


def test_checkpoint_without_tokenizer(directory: Path) -> None:
    write_safetensors(directory)
    checkpoint = Checkpoint.open(directory)
    assert (checkpoint.generation_config, checkpoint.tokenizer_files, checkpoint.chat_templates) == ({}, (), {})


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="accepted: a Hugging Face model directory"):
        Checkpoint.open(tmp_path / "absent")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        Checkpoint.open(tmp_path)


def test_no_weights(directory: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"has no weights.*model\.safetensors, .*pytorch_model\.bin"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\xff"])
def test_broken_config(directory: Path, text: str) -> None:
    write_safetensors(directory)
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointInvalid, match=r"accepted: .*(JSON object|UTF-8)") as caught:
        Checkpoint.open(directory)
    assert caught.value.subject == "config.json"


def test_broken_chat_template(directory: Path) -> None:
    write_safetensors(directory)
    write_json(directory / "tokenizer_config.json", {"chat_template": 3})
    with pytest.raises(CheckpointInvalid, match="Jinja"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("write", [write_safetensors, write_pickle])
@pytest.mark.parametrize("kept", [0, 4, 20, 0.5, 0.999])
def test_truncated_weights(directory: Path, write: Any, kept: float) -> None:
    write(directory)
    (file,) = Checkpoint.open(directory).files
    data = file.read_bytes()
    file.write_bytes(data[: int(kept if kept >= 1 else kept * len(data))])
    with pytest.raises(CheckpointInvalid, match=r"broken file.*accepted: ") as caught:
        Checkpoint.open(directory)
    assert caught.value.subject == file.name


def test_sharded_checkpoint_with_a_missing_file(directory: Path) -> None:
    write_sharded_safetensors(directory)
    (directory / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match="no such file") as caught:
        Checkpoint.open(directory)
    assert caught.value.subject == "model-1.safetensors"


def test_index_names_a_tensor_that_its_file_lacks(directory: Path) -> None:
    write_sharded_safetensors(directory)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["d.weight"] = "model-0.safetensors"
    write_json(index, content)
    with pytest.raises(CheckpointInvalid, match=r"d\.weight: got not in model-0\.safetensors"):
        Checkpoint.open(directory)


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
    write_safetensors(elsewhere)
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


def test_file_that_changed_after_opening(directory: Path) -> None:
    write_safetensors(directory)
    checkpoint = Checkpoint.open(directory)
    save_file({"a.weight": torch.ones(1)}, directory / "model.safetensors")
    with TensorReader(checkpoint) as reader, pytest.raises(CheckpointInvalid, match="changed since it was opened"):
        reader.read("b.weight")
    with TensorReader(checkpoint) as reader, pytest.raises(CheckpointInvalid, match="changed since it was opened"):
        reader.read("a.weight")


def test_digest_follows_content_not_place(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def digest(path: Path) -> str:
        return compute_checkpoint_digest(Checkpoint.open(path), sha256_file)

    write_sharded_safetensors(directory)
    copy = tmp_path_factory.mktemp("copy")
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("not part of it")
    original = digest(directory)
    assert digest(copy) == original
    save_file({"c": torch.tensor([8])}, copy / "model-2.safetensors")
    assert digest(copy) != original
    write_sharded_safetensors(copy)
    assert digest(copy) == original
    write_json(copy / "config.json", {"architectures": ["LlamaForCausalLM"], "rope_theta": 5.0})
    assert digest(copy) != original


def test_all_missing_files_are_named_at_once(directory: Path) -> None:
    write_sharded_safetensors(directory)
    for number in (0, 2):
        (directory / f"model-{number}.safetensors").unlink()
    with pytest.raises(CheckpointInvalid) as caught:
        Checkpoint.open(directory)
    assert [one.field for one in caught.value.violations] == ["model-0.safetensors", "model-2.safetensors"]


@pytest.mark.parametrize("write", [write_sharded_safetensors, write_sharded_pickle])
def test_tensors_elsewhere_than_the_index_says_are_named_at_once(directory: Path, write: Any) -> None:
    write(directory)
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
    write_sharded_safetensors(directory)
    save_file({"a.weight": torch.ones(1), "d": torch.ones(5)}, directory / "model-1.safetensors")
    index = directory / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"a.weight": "model-0.safetensors", "d": "model-1.safetensors"}})
    tensors = Checkpoint.open(directory).tensors
    assert {name: (header.file.name, header.shape) for name, header in tensors.items()} == {
        "a.weight": ("model-0.safetensors", (2, 3)),
        "d": ("model-1.safetensors", (5,)),
    }
    save_file({"d": torch.ones(5), "e": torch.ones(2)}, directory / "model-1.safetensors")
    assert Checkpoint.open(directory).tensors["e"].file.name == "model-1.safetensors"
