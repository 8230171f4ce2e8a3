"""A Hugging Face checkpoint directory, opened lazily: reads headers and JSON at once, tensors on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from bundle.digest import canonical_json, sha256_bytes
from bundle.shortage import find_shortage, name_shortage
from compiler_svc.weights.errors import CheckpointInvalid, CheckpointNotFound

#: Weight files in the order of preference.
SAFETENSORS_FILE: Final = "model.safetensors"
PICKLE_FILE: Final = "pytorch_model.bin"
WEIGHT_FILES: Final = (SAFETENSORS_FILE, f"{SAFETENSORS_FILE}.index.json", PICKLE_FILE, f"{PICKLE_FILE}.index.json")

#: Of one JSON file or template. Those of the largest published models have less than 16 MiB.
MAX_TEXT_BYTES: Final = 64 << 20

#: Files that belong to a tokenizer.
TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
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


@dataclass(frozen=True, slots=True)
class DescribingFile:
    """A file of a checkpoint that bundles take along for people and other tools."""

    path: Path
    media_type: str


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The header of one tensor in a checkpoint.

    Attributes:
        dtype: torch's name, such as `bfloat16`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its files must not change while it is in use.

    Attributes:
        files: Weight files, sorted by name.
        index: The index of a sharded checkpoint.
        tensors: Headers of all tensors, by name.
        config: `config.json`.
        generation_config: `generation_config.json`; empty if the file does not exist.
        tokenizer_files: Files of the tokenizer, sorted by name.
        describing_files: Configuration, licences and model card, sorted by name.
        chat_template: Jinja source of the default chat template.
    """

    path: Path
    files: tuple[Path, ...]
    index: Path | None
    tensors: Mapping[str, TensorHeader]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_files: tuple[Path, ...]
    describing_files: tuple[DescribingFile, ...]
    chat_template: str | None

    @property
    def is_pickled(self) -> bool:
        """Whether the weights are pickles."""
        return self.files[0].suffix == ".bin"

    @classmethod
    def open(cls, path: Path, *, roots: Sequence[Path] = (), read_pickles: bool = True) -> Checkpoint:
        """Reads a checkpoint's JSON and tensor headers, but no weights.

        Args:
            path: A directory with `config.json` and `model.safetensors`, `pytorch_model.bin` or the index of either.
            roots: Directories that must contain its files, after symbolic links are followed; empty allows any.
            read_pickles: If false, pickled files stay closed, since opening them needs torch, and `tensors` is empty.

        Raises:
            CheckpointNotFound: `path` is not a directory, or holds no configuration or no weights.
            CheckpointInvalid: A file is missing, outside `roots`, truncated or malformed.
        """
        directory = _Directory(path, tuple(root.resolve() for root in roots))
        if not path.is_dir():
            raise CheckpointNotFound(path, "no such directory", "a Hugging Face model directory")
        if not directory.has("config.json"):
            raise CheckpointNotFound(path, "has no config.json", "a directory with config.json")
        config = directory.read_json("config.json")
        weights = next((name for name in WEIGHT_FILES if directory.has(name)), None)
        if weights is None:
            raise CheckpointNotFound(path, "has no weights", f"a directory with one of {', '.join(WEIGHT_FILES)}")
        is_open = read_pickles or not weights.startswith(PICKLE_FILE)
        tensors: dict[str, TensorHeader] = {}
        if weights.endswith(".index.json"):
            index, weight_map = path / weights, _read_weight_map(directory, weights)
            files = set(weight_map.values())
            if is_open:
                tensors = _read_sharded_headers(path, index, weight_map)
        else:
            index, files = None, {directory.file(weights)}
            if is_open:
                tensors = _read_header(path / weights, path)
        return cls(
            path=path,
            files=tuple(sorted(files)),
            index=index,
            tensors=tensors,
            config=config,
            generation_config=directory.read_optional_json("generation_config.json"),
            tokenizer_files=tuple(directory.file(name) for name in TOKENIZER_FILES if directory.has(name)),
            describing_files=tuple(_list_describing_files(directory)),
            chat_template=_read_chat_template(directory),
        )


@dataclass(frozen=True, slots=True)
class _Directory:
    """Files of one directory, by plain name."""

    path: Path
    roots: tuple[Path, ...]

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def list_names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.path.iterdir())
        except OSError as error:
            invalid = CheckpointInvalid(self.path, ".", str(error), "a readable directory")
            raise name_shortage(error) or invalid from error

    def file(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise CheckpointInvalid(self.path, name, "no such file", "a file of the checkpoint directory")
        if self.roots and not any(file.resolve().is_relative_to(root) for root in self.roots):
            raise CheckpointInvalid(self.path, name, "a link out of the model roots", "a file within the model roots")
        return file

    def read_text(self, name: str) -> str:
        if (size_bytes := self.file(name).stat().st_size) > MAX_TEXT_BYTES:
            raise CheckpointInvalid(self.path, name, f"{size_bytes} bytes", f"a file of at most {MAX_TEXT_BYTES} bytes")
        try:
            return self.file(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            invalid = CheckpointInvalid(self.path, name, str(error), "a readable UTF-8 file")
            raise name_shortage(error) or invalid from error

    def read_json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.read_text(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointInvalid(self.path, name, f"text that is no JSON ({error})", "a JSON object") from error
        if not isinstance(value, dict):
            raise CheckpointInvalid(self.path, name, f"a JSON {type(value).__name__}", "a JSON object")
        return value

    def read_optional_json(self, name: str) -> dict[str, Any]:
        return self.read_json(name) if self.has(name) else {}


def _read_header(file: Path, checkpoint: Path) -> dict[str, TensorHeader]:
    if file.suffix == ".safetensors":
        headers = read_safetensors_header(file, checkpoint)
    else:
        # Importing torch takes seconds, and only pickles need it.
        from compiler_svc.weights.pickle_files import read_pickle_header  # noqa: PLC0415

        headers = read_pickle_header(file, checkpoint)
    return {name: TensorHeader(name, dtype, shape, file) for name, (dtype, shape) in headers.items()}


def _read_weight_map(directory: _Directory, index: str) -> dict[str, Path]:
    """Reads the file of each tensor, by the tensor's name."""
    weight_map = directory.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointInvalid(
            directory.path, f"{index}: weight_map", _kind(weight_map), "tensor names with file names"
        )
    suffix = ".safetensors" if index.startswith(SAFETENSORS_FILE) else ".bin"
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name) or not file_name.endswith(suffix):
            accepted = f"the name of a {suffix} file in the checkpoint directory"
            raise CheckpointInvalid(directory.path, f"{index}: weight_map[{name}]", repr(file_name), accepted)
    files = {file_name: directory.file(file_name) for file_name in dict.fromkeys(weight_map.values())}
    return {name: files[file_name] for name, file_name in weight_map.items()}


def _read_sharded_headers(checkpoint: Path, index: Path, weight_map: Mapping[str, Path]) -> dict[str, TensorHeader]:
    headers = {file: _read_header(file, checkpoint) for file in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in headers[file]:
            accepted = f"a tensor of {file.name}, as {index.name} says"
            raise CheckpointInvalid(checkpoint, name, f"not in {file.name}", accepted)
    return {name: headers[file][name] for name, file in weight_map.items()}


def _is_plain_name(name: str) -> bool:
    return name not in {"", ".", ".."} and not set(name) & {"/", "\\", "\0"}


def _kind(value: object) -> str:
    return "nothing" if not value else f"a {type(value).__name__}"


def _list_describing_files(directory: _Directory) -> Iterator[DescribingFile]:
    for name in directory.list_names():
        media_type = next((kind for pattern, kind in DESCRIBING_FILES if re.fullmatch(pattern, name, re.ASCII)), None)
        if media_type is not None and directory.has(name):
            yield DescribingFile(directory.file(name), media_type)


def _read_chat_template(directory: _Directory) -> str | None:
    if directory.has("chat_template.jinja"):
        return directory.read_text("chat_template.jinja")
    template = directory.read_optional_json("tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        accepted = "Jinja source, or a list with one named `default`"
        raise CheckpointInvalid(directory.path, "tokenizer_config.json: chat_template", _kind(template), accepted)
    return template


def compute_checkpoint_digest(checkpoint: Checkpoint, digest_file: Callable[[Path], str]) -> str:
    """Hashes the names and digests of `config.json`, the index of a sharded checkpoint and the weight files.

    Args:
        digest_file: Returns the digest of a file's bytes, such as `bundle.digest.sha256_file` or a cache for it.

    Returns:
        `sha256:` and 64 hexadecimal digits.
    """
    files = [checkpoint.path / "config.json", *checkpoint.files, *filter(None, [checkpoint.index])]
    return sha256_bytes(canonical_json({file.name: digest_file(file) for file in files}))


#: torch's names of the dtypes that a checkpoint may hold; other dtypes keep the file's name in lower case.
DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


def read_safetensors_header(file: Path, checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads dtype and shape of every tensor in a file, by name.

    Raises:
        CheckpointInvalid: The file is truncated or not a safetensors file.
    """
    try:
        with safe_open(file, framework="np") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 the object is no mapping
            return {
                name: (DTYPES.get(part.get_dtype(), part.get_dtype().lower()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        invalid = CheckpointInvalid(checkpoint, file.name, f"a broken file ({error})", "a whole safetensors file")
        raise find_shortage(error) or invalid from error
