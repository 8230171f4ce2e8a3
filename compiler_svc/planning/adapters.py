"""What the files of a configuration's LoRA adapters say of their number, ranks and modules.

NxD Inference raises the limits of a configuration to what its adapters need, and takes their modules if it names none.
So do plans and compiles, which open the JSON files for it. A plan does not fail if a file is not there: a note says so,
and the limits of the configuration hold. A compile does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bundle.errors import FieldViolation, KilnError
from bundle.reference import ACCEPTED_ADAPTER_NAME, is_adapter_name
from compiler_svc.adapters.config import read_config
from compiler_svc.adapters.directory import find_files, reading_adapter
from compiler_svc.adapters.errors import AdapterInvalid
from compiler_svc.config import LoraServingConfig, NeuronConfig
from compiler_svc.config.domains import MAX_TEXTS, TEXTS
from compiler_svc.errors import ConfigInvalid
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.transforms import ALL_LINEAR, list_targets
from compiler_svc.planning.model_roots import find_adapter
from compiler_svc.weights.directory import CheckpointDirectory

_PATH: Final = "neuron_config.lora_config"
TARGETS_PATH: Final = f"{_PATH}.target_modules"
_LISTING: Final = f"{_PATH}.lora_ckpt_json"
#: The maps of a configuration and of its listing, and whether their adapters are in slots from the start.
_MAPS: Final = (("lora_ckpt_paths", True), ("lora_ckpt_paths_cpu", False))
_ACCEPTED_LISTING: Final = "a JSON object with lora-ckpt-dir, lora-ckpt-paths and lora-ckpt-paths-cpu"
#: Adapters that cannot be read and are named one by one.
_MAX_NAMED: Final = 16


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter that comes with a compile: a directory of PEFT, or a file of NxD, links resolved.

    With `is_on_device`, it is to be in a slot from the start, otherwise in the host's memory. `place` is what names it
    in the configuration.
    """

    name: str
    path: Path
    is_on_device: bool
    place: str


@dataclass(frozen=True, slots=True)
class Adapters:
    """What was read of a configuration's adapters.

    Attributes:
        listed: Those that were found.
        num_on_device: Adapters, found or not, that are to be in slots from the start; `num_on_host` counts the others.
        largest_rank: Of the files that could be read; 0 if none could.
        targets: Modules that they change, by names as `target_modules` has them; none if a file did not say it.
    """

    listed: tuple[ListedAdapter, ...] = ()
    num_on_device: int = 0
    num_on_host: int = 0
    largest_rank: int = 0
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def widen(self, config: NeuronConfig) -> NeuronConfig:
        """The configuration with room for them."""
        lora = config.lora_config
        if lora is None:
            return config
        widened = replace(
            lora,
            max_loras=max(lora.max_loras, self.num_on_device),
            max_cpu_loras=max(lora.max_cpu_loras, self.num_on_host),
            max_lora_rank=max(lora.max_lora_rank, self.largest_rank),
            target_modules=lora.target_modules or self.targets,
        )
        return replace(config, lora_config=widened)


@dataclass(frozen=True, slots=True)
class _Named:
    """An adapter as a configuration names it."""

    name: str
    path: str
    is_on_device: bool
    place: str


@dataclass(frozen=True, slots=True)
class _Read:
    """What the configuration of an adapter says; `targets` None: nothing that can be read off it."""

    rank: int
    targets: tuple[str, ...] | None


def list_adapters(lora: LoraServingConfig | None, model_roots: tuple[Path, ...]) -> tuple[ListedAdapter, ...]:
    """Lists the adapters of a configuration, by `lora_ckpt_paths`, `lora_ckpt_paths_cpu` or `lora_ckpt_json`: each name
    once, on the device if any of them says so.

    Raises AdapterNotFound, PathOutsideModelRoots, AdapterInvalid for a listing that is none, or ConfigInvalid for a
    name with two paths, or one that no request can give.
    """
    named = [] if lora is None else [*_list_named(lora, model_roots)]
    return tuple(_find(one, model_roots) for one in named)


def read_adapters(lora: LoraServingConfig | None, model_roots: tuple[Path, ...], *, is_strict: bool) -> Adapters:
    """Reads what a configuration's adapters need from their files, which must be below `model_roots` after symbolic
    links are followed.

    If `is_strict`, raises as `list_adapters`, and AdapterInvalid for the first configuration that is not served.
    Otherwise notes say what could not be read.
    """
    if lora is None:
        return Adapters()
    try:
        named = [*_list_named(lora, model_roots)]
    except KilnError as error:
        if is_strict:
            raise
        return Adapters(notes=(f"{_PATH}: its adapters are not counted: {error}",))
    listed: list[ListedAdapter] = []
    read: dict[str, _Read] = {}
    unread: list[str] = []
    bound = f"its rank is taken to be at most max_lora_rank, {lora.max_lora_rank}"
    for one in named:
        try:
            listed.append(_find(one, model_roots))
            if listed[-1].path.is_file():
                unread.append(f"{one.place}: {bound}: it is a pickle, which only a build opens")
            else:
                read[one.place] = _read(listed[-1], model_roots)
        except KilnError as error:
            if is_strict:
                raise
            unread.append(f"{one.place}: {bound}: {error}")
    found = Adapters(
        listed=tuple(listed),
        num_on_device=sum(one.is_on_device for one in named),
        num_on_host=sum(not one.is_on_device for one in named),
        largest_rank=max((one.rank for one in read.values()), default=0),
        targets=_join_targets([read.get(one.place) for one in named]),
    )
    return replace(found, notes=(*_cut(unread), *_note_limits(lora, found, read)))


def find_unmatched_targets(lora: LoraServingConfig | None, model: ModelDescription) -> Iterator[str]:
    """Yields a warning if some names of `target_modules` match no layer that adapters may change."""
    targets = () if lora is None else lora.target_modules
    layers = [(one, model.find_module(one)) for one in model.linears() if one.is_adaptable]
    names = set().union(*(list_targets(*layer) for layer in layers))
    unmatched = [one for one in targets if one not in names]
    if unmatched:
        modules = dict.fromkeys(module.rpartition(".")[2] for _, module in layers)
        rest = "" if len(unmatched) < len(targets) else "; so adapters take no memory in this plan"
        yield (
            f"{TARGETS_PATH}: {_list(unmatched)} match no linear layer that adapters may change, which are "
            f"{_list(modules)}, or {ALL_LINEAR}{rest}"
        )


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _note_limits(lora: LoraServingConfig, found: Adapters, read: Mapping[str, _Read]) -> Iterator[str]:
    largest = max(read, key=lambda place: read[place].rank, default="")
    if found.largest_rank > lora.max_lora_rank:
        yield f"{_PATH}.max_lora_rank: {lora.max_lora_rank} is raised to {found.largest_rank}, the rank of {largest}"
    for name, limit, number in (
        ("max_loras", lora.max_loras, found.num_on_device),
        ("max_cpu_loras", lora.max_cpu_loras, found.num_on_host),
    ):
        if number > limit:
            yield f"{_PATH}.{name}: {limit} is raised to {number}, the number of adapters"


def _cut(unread: list[str]) -> Iterator[str]:
    yield from unread[:_MAX_NAMED]
    if len(unread) > _MAX_NAMED:
        yield f"{_PATH}: {len(unread) - _MAX_NAMED} other adapters cannot be read either"


def _join_targets(read: list[_Read | None]) -> tuple[str, ...]:
    """The modules of all adapters; none if one of them does not say which it changes."""
    targets: set[str] = set()
    for one in read:
        if one is None or one.targets is None:
            return ()
        targets.update(one.targets)
    return tuple(sorted(targets)) if len(targets) <= MAX_TEXTS else (ALL_LINEAR,)


def _list_named(lora: LoraServingConfig, model_roots: tuple[Path, ...]) -> Iterator[_Named]:
    """Each name once."""
    named: dict[str, _Named] = {}
    for one in (*_list_maps(lora), *_list_listing(lora.lora_ckpt_json, model_roots)):
        if not is_adapter_name(one.name):
            raise ConfigInvalid([FieldViolation(one.place, repr(one.name), f"a name of {ACCEPTED_ADAPTER_NAME}")])
        first = named.setdefault(one.name, one)
        if first.path != one.path:
            accepted = f"{first.path!r}, which {first.place} says"
            raise ConfigInvalid([FieldViolation(one.place, repr(one.path), accepted)])
    yield from named.values()


def _list_maps(lora: LoraServingConfig) -> Iterator[_Named]:
    for name, is_on_device in _MAPS:
        for adapter, path in getattr(lora, name).items():
            yield _Named(adapter, path, is_on_device, f"{_PATH}.{name}.{adapter}")


def _list_listing(path: str | None, model_roots: tuple[Path, ...]) -> Iterator[_Named]:
    """The adapters of a JSON file."""
    if path is None:
        return
    file = find_adapter(path, model_roots, field=_LISTING)
    with reading_adapter(Path(path)):
        listing = CheckpointDirectory(file.parent, tuple(root.resolve() for root in model_roots)).read_json(file.name)
    directory = listing.get("lora-ckpt-dir") or ""
    for name, is_on_device in _MAPS:
        paths = listing.get(name.replace("_", "-")) or {}
        if not isinstance(directory, str) or not isinstance(paths, Mapping):
            raise AdapterInvalid(path, [FieldViolation(_LISTING, "other values", _ACCEPTED_LISTING)])
        if len(paths) > MAX_TEXTS:
            accepted = f"at most {MAX_TEXTS}"
            raise AdapterInvalid(path, [FieldViolation(name, f"{len(paths)} adapters", accepted)])
        for adapter, below in paths.items():
            yield _Named(adapter, str(Path(directory) / str(below)), is_on_device, f"{_LISTING}, {adapter}")


def _find(named: _Named, model_roots: tuple[Path, ...]) -> ListedAdapter:
    path = find_adapter(named.path, model_roots, field=named.place)
    return ListedAdapter(named.name, path, named.is_on_device, named.place)


def _read(adapter: ListedAdapter, model_roots: tuple[Path, ...]) -> _Read:
    files = find_files(adapter.path, roots=model_roots, field=adapter.place)
    config = files.config or {}
    targets = config.get("target_modules")
    # A text is a regular expression of names, or means all linear layers.
    is_told = isinstance(targets, list) and targets and TEXTS.accepts(targets)
    return _Read(read_config(files.name, config).largest_rank, tuple(targets or ()) if is_told else None)
