"""Opens adapters: directories of PEFT, and files of NxD's training. Tensors stay on disk until they are touched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open

from bundle.errors import FieldViolation
from bundle.host.shortage import find_shortage
from compiler_svc.adapters.config import AdapterConfig, read_config
from compiler_svc.adapters.directory import AdapterFiles, find_files, reading_adapter
from compiler_svc.adapters.errors import AdapterInvalid
from compiler_svc.weights.pickle_files import check_state, unpickle

#: What NxD's file calls its configuration, among the tensors.
_NXD_CONFIG: Final = "lora_config"

Kind = Literal["lora_A", "lora_B"]
KINDS: Final[tuple[Kind, ...]] = ("lora_A", "lora_B")

#: PEFT puts its own prefix before the model's names, once for each model that it wraps; and where it has not removed
#: it, the adapter's name before `weight`. Experts are refused.
_MATRIX: Final = re.compile(
    r"(?:base_model\.model\.)*(?P<module>(?!.*\.experts\.).+)\.(?P<kind>lora_A|lora_B)(?:\.[^.]+)?\.weight"
)
#: Other tensors, by what their names contain: what they are, and what would be accepted.
_REFUSED: Final = (
    (re.compile(r"\.experts\."), "an adapter of experts", "adapters of dense layers"),
    (re.compile(r"\.lora_embedding_[AB]\b"), "an adapter of embeddings", "adapters of linear layers"),
    (re.compile(r"\.lora_magnitude_vector\b"), "DoRA's magnitudes", "plain LoRA"),
    (re.compile(r"\.lora_[AB]\b.*\.bias$"), "a bias of an adapter", "an adapter with lora_bias false"),
    (re.compile(r"\.lora_"), "no matrix of plain LoRA", "lora_A.weight and lora_B.weight of linear layers"),
    (re.compile(""), "a tensor of the model itself", "an adapter that was saved without the model's own tensors"),
)


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter changes of a module: B [outputs, rank] A [rank, inputs], by kind and as the file has them.

    `names` are the file's, of the same tensors.
    """

    module: str
    names: Mapping[Kind, str]
    tensors: Mapping[Kind, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter: its path below its root, for errors, its configuration, and what it changes.

    Its files must not change while it is in use.
    """

    name: Path
    config: AdapterConfig
    changes: tuple[LowRank, ...]


def open_adapter(path: Path, *, roots: Sequence[Path] = ()) -> Adapter:
    """Opens an adapter without reading its tensors.

    Raises AdapterNotFound if there is none, and AdapterInvalid if its files are broken, or if its configuration or its
    tensors are not served; the error lists all of these.

    Args:
        path: A directory of PEFT, or a file of NxD's training.
        roots: Directories that must contain its files, after symbolic links are followed; empty allows any.
    """
    files = find_files(path, roots=roots)
    with reading_adapter(files.name):
        config, state = _read_tensors(files)
        return Adapter(files.name, read_config(files.name, config), tuple(_pair(files.name, state)))


def _read_tensors(files: AdapterFiles) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    """The configuration of an adapter, and its tensors by their names."""
    file = files.weights
    if files.config is None:
        return _read_nxd(file, files.name)
    if file.suffix == ".safetensors":
        return files.config, _map_tensors(file, files.name)
    return files.config, check_state(unpickle(file, file.parent), file, file.parent)


def _read_nxd(file: Path, name: Path) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
    state = unpickle(file, file.parent)
    config = state.pop(_NXD_CONFIG, None)
    if not isinstance(config, Mapping) or not all(
        isinstance(name, str) and not isinstance(value, torch.Tensor) for name, value in config.items()
    ):
        value = "missing" if config is None else f"a {type(config).__name__}"
        accepted = "NxD's configuration of the adapter, as save_lora_config_adapter writes it"
        raise AdapterInvalid(name, [FieldViolation(_NXD_CONFIG, value, accepted)])
    return config, check_state(state, file, file.parent)


def _map_tensors(file: Path, name: Path) -> dict[str, torch.Tensor]:
    """Maps the tensors of a safetensors file into memory."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 the object is no mapping
    # torch raises RuntimeError for a file that is gone.
    except (SafetensorError, OSError, RuntimeError) as error:
        value = f"a broken file ({error})"
        invalid = AdapterInvalid(name, [FieldViolation(file.name, value, "a whole safetensors file")])
        raise find_shortage(error) or invalid from error


def _pair(adapter: Path, state: Mapping[str, torch.Tensor]) -> Iterator[LowRank]:
    """Finds A and B of each module."""
    names: dict[str, dict[Kind, str]] = {}
    mistakes = []
    for name in state:
        found = _MATRIX.fullmatch(name)
        if found is None:
            _, value, accepted = next(row for row in _REFUSED if row[0].search(name))
            mistakes.append(FieldViolation(name, value, accepted))
            continue
        kind: Kind = "lora_A" if found["kind"] == "lora_A" else "lora_B"
        other = names.setdefault(found["module"], {}).setdefault(kind, name)
        if other != name:
            mistakes.append(FieldViolation(name, f"one more {kind} of {found['module']}", f"{other} alone"))
    for module, own in names.items():
        lacking = (kind for kind in KINDS if kind not in own)
        mistakes += [FieldViolation(f"{module}.{kind}.weight", "missing", "both matrices of it") for kind in lacking]
    if not state:
        mistakes.append(FieldViolation(".", "no tensors", "lora_A and lora_B of at least one linear layer"))
    if mistakes:
        raise AdapterInvalid.listing(adapter, mistakes)
    for module, own in names.items():
        yield LowRank(module, own, {kind: state[name] for kind, name in own.items()})
