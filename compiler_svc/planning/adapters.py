"""What the files of a configuration's LoRA adapters say of their number and ranks.

NxD Inference raises `max_loras` and `max_lora_rank` to what the adapters need, so plans open them. An adapter is a
directory below a model root whose `adapter_config.json` is PEFT's. A plan does not fail if one is not there: a note
says so, and the limits of the configuration hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bundle.errors import KilnError
from compiler_svc.adapters.config import CONFIG_FILE, read_config
from compiler_svc.adapters.errors import AdapterInvalid
from compiler_svc.config import LoraServingConfig
from compiler_svc.config.domains import MAX_TEXTS
from compiler_svc.planning.admission import find_checkpoint

_PATH: Final = "neuron_config.lora_config"
_MAX_FILE_BYTES: Final = 1 << 20
#: Adapters that cannot be read and are named one by one.
_MAX_NAMED: Final = 16


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters whose files could be read, how many of them a rank keeps in memory, and the largest rank of all; 0
    if no file could be read.
    """

    num_on_device: int = 0
    largest_rank: int = 0
    notes: tuple[str, ...] = ()


NO_ADAPTERS: Final = Adapters()


class _Unreadable(Exception):
    """A file that cannot be read; its text says why."""


@dataclass(frozen=True, slots=True)
class _Listed:
    place: str
    path: str
    is_on_device: bool


def read_adapters(lora: LoraServingConfig | None, model_roots: tuple[Path, ...]) -> Adapters:
    """Reads the ranks of a configuration's adapters from their files, which must be below `model_roots` after symbolic
    links are followed.
    """
    if lora is None:
        return NO_ADAPTERS
    try:
        listed = [*_list_adapters(lora, model_roots)]
    except _Unreadable as error:
        return Adapters(notes=(f"{_PATH}.lora_ckpt_json: its adapters are not counted: {error}",))
    ranks: dict[str, int] = {}
    unread: list[str] = []
    for one in listed:
        try:
            ranks[one.place] = _read_rank(one.path, model_roots)
        except _Unreadable as error:
            unread.append(f"{one.place}: its rank is taken to be at most max_lora_rank, {lora.max_lora_rank}: {error}")
    notes = unread[:_MAX_NAMED]
    if len(unread) > _MAX_NAMED:
        notes.append(f"{_PATH}: {len(unread) - _MAX_NAMED} other adapters cannot be read either")
    largest = max(ranks, key=lambda place: ranks[place], default="")
    if ranks and ranks[largest] > lora.max_lora_rank:
        notes.append(
            f"{_PATH}.max_lora_rank: {lora.max_lora_rank} is raised to {ranks[largest]}, the rank of {largest}"
        )
    num_on_device = sum(one.is_on_device for one in listed)
    if num_on_device > lora.max_loras:
        notes.append(f"{_PATH}.max_loras: {lora.max_loras} is raised to {num_on_device}, the number of adapters")
    return Adapters(num_on_device, ranks[largest] if ranks else 0, tuple(notes))


def _list_adapters(lora: LoraServingConfig, model_roots: tuple[Path, ...]) -> Iterator[_Listed]:
    for name, paths, is_on_device in (
        ("lora_ckpt_paths", lora.lora_ckpt_paths, True),
        ("lora_ckpt_paths_cpu", lora.lora_ckpt_paths_cpu, False),
    ):
        for adapter, path in paths.items():
            yield _Listed(f"{_PATH}.{name}.{adapter}", path, is_on_device)
    if lora.lora_ckpt_json is None:
        return
    listing = _read_json(lora.lora_ckpt_json, model_roots)
    directory = listing.get("lora-ckpt-dir") or ""
    for name, is_on_device in (("lora-ckpt-paths", True), ("lora-ckpt-paths-cpu", False)):
        paths = listing.get(name) or {}
        if not isinstance(directory, str) or not isinstance(paths, Mapping):
            raise _Unreadable("lora-ckpt-dir must be text, lora-ckpt-paths and lora-ckpt-paths-cpu objects")
        if len(paths) > MAX_TEXTS:
            raise _Unreadable(f"{name} lists {len(paths)} adapters, more than {MAX_TEXTS}")
        for adapter, path in paths.items():
            yield _Listed(f"{_PATH}.lora_ckpt_json, {adapter}", str(Path(directory) / str(path)), is_on_device)


def _read_rank(path: str, model_roots: tuple[Path, ...]) -> int:
    config = _read_json(f"{path}/{CONFIG_FILE}", model_roots)
    try:
        return read_config(path, config).largest_rank
    except AdapterInvalid as error:
        raise _Unreadable(str(error)) from error


def _read_json(path: str, model_roots: tuple[Path, ...]) -> dict[str, Any]:
    directory, _, name = path.rpartition("/")
    try:
        # An empty path is the root itself.
        file = (find_checkpoint(directory or ("/" if path.startswith("/") else "."), model_roots) / name).resolve()
        if not any(file.is_relative_to(root.resolve()) for root in model_roots):
            raise _Unreadable("a link leads outside of the model roots")
        if file.exists() and not file.is_file():
            raise _Unreadable(f"{name} is no file")
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise _Unreadable(f"{name} has more than {_MAX_FILE_BYTES} bytes")
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"{name} is no JSON") from error
    except (KilnError, OSError, RuntimeError) as error:  # the last: a link that leads to itself
        raise _Unreadable(str(error)) from error
    if not isinstance(value, dict):
        raise _Unreadable(f"{name} holds no object")
    return value
