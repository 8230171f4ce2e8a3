"""A Hugging Face directory or a GGUF file, opened lazily: reads headers and JSON at once, tensors on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from bundle.digest import canonical_json, sha256_bytes
from bundle.host.reading import reading
from compiler_svc.models.attributes import AttributeReader
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.errors import ModelError
from compiler_svc.models.packings import UNSAID, Packing, read_packing
from compiler_svc.models.registry import describe_model, read_text_config
from compiler_svc.weights.chat_templates import (
    DEFAULT_FILE,
    check_templates,
    list_template_files,
    read_chat_templates,
)
from compiler_svc.weights.directory import CheckpointDirectory
from compiler_svc.weights.errors import (
    CheckpointError,
    CheckpointInvalid,
    CheckpointNotFound,
    QuantizedCheckpointInvalid,
)
from compiler_svc.weights.gguf.header import is_gguf, read_header
from compiler_svc.weights.gguf.model import GgufModel, GgufTensor
from compiler_svc.weights.headers import TensorHeader, read_headers, read_sharded_headers, read_weight_map
from compiler_svc.weights.packed import PackedMatrix, find_packed

CONFIG_FILE: Final = "config.json"
#: Weight files in the order of preference.
SAFETENSORS_FILE: Final = "model.safetensors"
PICKLE_FILE: Final = "pytorch_model.bin"
WEIGHT_FILES: Final = (SAFETENSORS_FILE, f"{SAFETENSORS_FILE}.index.json", PICKLE_FILE, f"{PICKLE_FILE}.index.json")

#: Files that belong to a tokenizer.
TOKENIZER_FILES: Final = (
    "added_tokens.json",
    DEFAULT_FILE,
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

#: Files that say what a checkpoint is and under which terms it may be used: bundles take them along. Each row is a
#: pattern of the whole name and a media type.
DESCRIBING_FILES: Final = (
    (r"config\.json", "application/json"),
    (r"generation_config\.json", "application/json"),
    (r"(LICENSE|NOTICE)[\w.-]*", "text/plain"),
    (r"README[\w.-]*", "text/markdown"),
)


_FLATTENED: Final = "safetensors: load the model with transformers 5 and torchao, and save it"
_LASTING: Final = "files that can be read, and stay as they are"


@dataclass(frozen=True, slots=True)
class DescribingFile:
    """A file of a checkpoint that bundles take along for people and other tools."""

    path: Path
    media_type: str


@dataclass(frozen=True, slots=True)
class SurplusTensor:
    """A tensor that the model does not take; `is_bias`: of a module that the model has, so that zeros alone may stand.

    `pattern` is its name, or that of all in the module which the model lacks: `v_head.*`.
    """

    header: TensorHeader
    pattern: str
    is_bias: bool


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its files must not change while it is in use; each tuple of files is sorted by name.

    Attributes:
        config: `config.json`; of a text model inside of another, its attributes at the top level.
        generation_config: `generation_config.json`; empty if the file does not exist.
        describing_files: Configuration, licences and model card.
        chat_templates: Jinja source of each chat template, by name.
        template_files: Files of chat templates other than the default, by the template's name.
        whole_config: `config.json` as the file has it.
        packed: Matrices that are quantized, by name. `tensors` has them as if they were not.
        gguf: Tensors of a GGUF file, by name; its `path` is that file, and its `tokenizer_files` have the vocabulary.
        surplus: Tensors that were set aside; see `weights.inventory`.
        weights_path: The directory of its weights, if that is another one.
    """

    path: Path
    files: tuple[Path, ...]
    index: Path | None
    tensors: Mapping[str, TensorHeader]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_files: tuple[Path, ...]
    describing_files: tuple[DescribingFile, ...]
    chat_templates: Mapping[str, str]
    template_files: Mapping[str, Path]
    whole_config: Mapping[str, Any] = field(default_factory=dict)
    packed: Mapping[str, PackedMatrix | GgufTensor] = field(default_factory=dict)
    gguf: Mapping[str, GgufTensor] = field(default_factory=dict)
    surplus: tuple[SurplusTensor, ...] = ()
    weights_path: Path | None = None

    @cached_property
    def description(self) -> ModelDescription:
        """What `config` describes; raises ModelConfigInvalid or ModelNotServed if this compiler does not build it."""
        return describe_model(self.config)

    @property
    def is_gguf(self) -> bool:
        """Whether it is one GGUF file."""
        return bool(self.gguf)

    @property
    def config_files(self) -> tuple[Path, ...]:
        """`config.json`, if it has one: of a GGUF file, the same bytes say what the model is."""
        return () if self.is_gguf else (self.path / CONFIG_FILE,)

    @property
    def is_pickled(self) -> bool:
        """Whether the weights are pickles."""
        return self.files[0].suffix == ".bin"

    @classmethod
    def open(cls, path: Path, *, roots: Sequence[Path] = (), read_pickles: bool = True) -> Checkpoint:
        """Reads a checkpoint's JSON and tensor headers, but no weights.

        Args:
            path: A directory with `config.json` and `model.safetensors`, `pytorch_model.bin` or the index of either;
                or a GGUF file.
            roots: Directories that must contain its files, after symbolic links are followed; empty allows any.
            read_pickles: If false, pickled files stay closed, since opening them needs torch, and `tensors` is empty.
        """
        with reading(lambda detail: CheckpointInvalid(path, ".", detail, _LASTING)):
            return cls._open(path, tuple(root.resolve() for root in roots), read_pickles=read_pickles)

    @classmethod
    def _open(cls, path: Path, roots: tuple[Path, ...], *, read_pickles: bool) -> Checkpoint:
        directory = CheckpointDirectory(path, roots)
        # As clients name it; a compile that is resumed knows its path alone.
        named = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        accepted = "a Hugging Face model directory, or a GGUF file"
        if path.is_file():
            file = CheckpointDirectory(path.parent, roots).file(path.name)
            if not is_gguf(file):
                raise CheckpointNotFound(named, "a file that does not begin with GGUF", accepted)
            return cls._open_gguf(file)
        if not path.is_dir():
            raise CheckpointNotFound(named, "no such directory", accepted)
        if not directory.has(CONFIG_FILE):
            raise CheckpointNotFound(named, f"has no {CONFIG_FILE}", f"a directory with {CONFIG_FILE}")
        config = directory.read_json(CONFIG_FILE)
        weights = _find_weights(directory)
        if weights is None:
            raise CheckpointNotFound(named, "has no weights", f"a directory with one of {', '.join(WEIGHT_FILES)}")
        text_config = read_text_config(config)
        # The description of the model complains about what is not served.
        packing = read_packing(AttributeReader(text_config)) or UNSAID
        return cls(
            path=path,
            **_open_weights(directory, weights, packing, read_pickles=read_pickles),
            config=text_config,
            generation_config=directory.read_optional_json("generation_config.json"),
            tokenizer_files=tuple(directory.small_file(name) for name in TOKENIZER_FILES if directory.has(name)),
            describing_files=tuple(_list_describing_files(directory)),
            chat_templates=read_chat_templates(directory),
            template_files=list_template_files(directory),
            whole_config=config,
        )

    @classmethod
    def _open_gguf(cls, path: Path) -> Checkpoint:
        model = GgufModel(path, read_header(path))
        config = read_text_config(model.config)
        return cls(
            path=path,
            files=(path,),
            index=None,
            tensors={
                name: TensorHeader(name, one.type.dtype or "float32", one.shape, path)
                for name, one in model.tensors.items()
            },
            config=config,
            generation_config={},
            tokenizer_files=(path,) if model.has_tokenizer else (),
            describing_files=(),
            chat_templates=check_templates(path, model.chat_templates),
            template_files={},
            whole_config=config,
            packed={name: one for name, one in model.tensors.items() if not one.type.dtype},
            gguf=model.tensors,
        )

    def with_weights(self, path: Path, *, roots: Sequence[Path] = (), read_pickles: bool = True) -> Checkpoint:
        """The checkpoint with the quantized weights of another directory in place of its own; takes what `open` takes.

        The directory's own `config.json`, if it has one, says how they are quantized. Raises QuantizedCheckpointInvalid
        if there are none, or if this is a GGUF file.
        """
        if self.is_gguf:
            raise QuantizedCheckpointInvalid(path.name, "which takes the place of no GGUF file's weights")
        with reading(lambda detail: QuantizedCheckpointInvalid(path.name, detail)):
            directory = CheckpointDirectory(path, tuple(root.resolve() for root in roots))
            weights = _find_weights(directory)
            if weights is None:
                raise QuantizedCheckpointInvalid(path.name, "has no weights")
            try:
                config = directory.read_optional_json(CONFIG_FILE)
                with AttributeReader(read_text_config(config) if config else {}) as reader:
                    packing = read_packing(reader) or UNSAID
                opened = _open_weights(directory, weights, packing, read_pickles=read_pickles)
            except (CheckpointError, ModelError) as error:
                raise QuantizedCheckpointInvalid(path.name, str(error)) from error
            if not opened["packed"] and opened["tensors"]:
                raise QuantizedCheckpointInvalid(path.name, "whose matrices are not quantized")
            return replace(self, **opened, weights_path=path)


def _find_weights(directory: CheckpointDirectory) -> str | None:
    return next((name for name in WEIGHT_FILES if directory.has(name)), None)


def _open_weights(
    directory: CheckpointDirectory, weights: str, packing: Packing, *, read_pickles: bool
) -> dict[str, Any]:
    """Opens weights by their name among `WEIGHT_FILES`; returns the attributes of a checkpoint that they make."""
    path, tensors = directory.path, dict[str, TensorHeader]()
    if packing.is_flattened and weights.startswith(PICKLE_FILE):
        raise CheckpointInvalid(path, weights, "pickles of a library's own tensors", _FLATTENED)
    is_open = read_pickles or not weights.startswith(PICKLE_FILE)
    if weights.endswith(".index.json"):
        index, weight_map = path / weights, read_weight_map(directory, weights)
        files = set(weight_map.values())
        if is_open:
            tensors = read_sharded_headers(path, index, weight_map)
    else:
        index, files = None, {directory.file(weights)}
        if is_open:
            tensors = read_headers(path / weights, path)
    tensors, packed, mistakes = find_packed(tensors, packing)
    if mistakes:
        raise CheckpointInvalid.listing(path, mistakes)
    return {"files": tuple(sorted(files)), "index": index, "tensors": tensors, "packed": packed}


def _list_describing_files(directory: CheckpointDirectory) -> Iterator[DescribingFile]:
    for name in directory.list_names():
        media_type = next((kind for pattern, kind in DESCRIBING_FILES if re.fullmatch(pattern, name, re.ASCII)), None)
        if media_type is not None and directory.has(name):
            yield DescribingFile(directory.file(name), media_type)


def compute_checkpoint_digest(checkpoint: Checkpoint, digest_file: Callable[[Path], str]) -> str:
    """Hashes the names and digests of `config.json`, the index of a sharded checkpoint and the weight files."""
    files = [*checkpoint.config_files, *checkpoint.files, *filter(None, [checkpoint.index])]
    with reading(lambda detail: CheckpointInvalid(checkpoint.path, ".", detail, _LASTING)):
        digests = {file.name: digest_file(file) for file in files}
        if checkpoint.weights_path is not None and (said := checkpoint.weights_path / CONFIG_FILE).is_file():
            digests[f"weights/{CONFIG_FILE}"] = digest_file(said)
        return sha256_bytes(canonical_json(digests))
