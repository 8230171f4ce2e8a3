"""What `kiln run` and `kiln serve` share: their options, and how they show a person what happens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import click
from kiln.compiler.v1.compiler_pb2 import CompileMetadata
from kiln.runtime.v1.runtime_pb2 import Deployment, LoadProgress

from kiln_client.bundles import AsyncBundles
from kiln_client.cli.homes import HOME, MODEL_ROOTS, YES
from kiln_client.cli.option_rows import add_options
from kiln_client.cli.output import Output
from kiln_client.cli.parameters import DOCUMENT, OVERRIDE, read_configuration
from kiln_client.cli.progress import ProgressView
from kiln_client.cli.pull import pull
from kiln_client.errors import Unavailable
from kiln_client.local.configuration import Configuration, Given
from kiln_client.local.lookup import Checkpoint, HubModel, find_checkpoint, find_named
from kiln_client.local.preparation import CompiledModel, ModelBuild, compile_model, load_model, take_bundle
from kiln_client.local.quick_start import QuickStart, end_quick, is_quicker
from kiln_client.overrides import apply_overrides, parse_override
from kiln_client.stack.home import StackRecord, make_home

_OPTIONS = (
    HOME,
    MODEL_ROOTS,
    click.option(
        "--config",
        type=DOCUMENT,
        help="Configuration, as for `kiln compile`. Default: from the checkpoint and the memory.",
    ),
    OVERRIDE,
    click.option(
        "-O",
        "--optimization-level",
        type=click.Choice(["0", "1", "2"]),
        help="As for `kiln compile`: 0 compiles at once, runs slowly and needs no C++ compiler. Default: 1.",
    ),
    YES,
)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a person says of a model besides its name.

    Attributes:
        home: Directory of all state.
        model_roots: Directories of checkpoints, besides the home's.
        given: What the person says of its configuration.
        yes: Download it without asking.
    """

    home: Path
    model_roots: tuple[Path, ...]
    given: Given
    yes: bool


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say where a model is and how it is compiled; the function takes them as `choice`."""

    @functools.wraps(function)
    def run(
        *,
        home: Path,
        model_roots: tuple[Path, ...],
        config: BinaryIO | None,
        overrides: tuple[str, ...],
        optimization_level: str | None,
        yes: bool,
        **others: Any,
    ) -> Any:
        given = read_given(config, overrides, optimization_level)
        return function(choice=ModelChoice(home, model_roots, given, yes), **others)

    return add_options(_OPTIONS)(run)


def read_given(config: BinaryIO | None, overrides: tuple[str, ...], optimization_level: str | None) -> Given:
    """Reads what a person says of a configuration.

    Raises:
        DocumentInvalid: The file is no text, neither YAML nor JSON, or a list.
        OverrideInvalid: An override is malformed, or its path leads nowhere.
    """
    level = None if optimization_level is None else int(optimization_level)
    if config is not None:
        return Given(read_configuration(config, overrides), is_file=True, optimization_level=level)
    document = apply_overrides({}, [parse_override(text) for text in overrides])
    return Given(document, is_file=False, optimization_level=level)


def find_here(output: Output, model: str, model_roots: Sequence[Path], home: Path, *, yes: bool) -> Checkpoint | None:
    """Finds a checkpoint without the services; downloads it from the Hub if it is nowhere else.

    Args:
        output: Shows a download.
        model: What the person wrote.
        model_roots: Directories of checkpoints.
        home: Home whose model root a download goes to.
        yes: Download without asking.

    Returns:
        The checkpoint; None if `model` may be a bundle, which the compiler knows.
    """
    found = find_checkpoint(model, model_roots)
    if isinstance(found, HubModel):
        make_home(home)
        return Checkpoint.open(pull(output, found.repo_id, home / "models", yes=yes).path)
    return found


async def prepare(
    services: StackRecord,
    model: Checkpoint | str,
    given: Given,
    batch_size: int,
    view: PreparationView,
    *,
    may_replace: bool,
    deployment_id: str | None = None,
) -> Deployment:
    """Makes a model ready to answer.

    Args:
        services: The services of the home.
        model: A checkpoint; or the text of a person, if `find_here` does not know it.
        given: What the person says of the configuration.
        batch_size: Rows of the KV cache, if the person gives none.
        view: Told what happens.
        may_replace: Whether idle deployments are unloaded that are in the way, as `load_model` says.
        deployment_id: Id that the deployment must have; None takes one after the model.

    Raises:
        click.UsageError: The model is a bundle, whose configuration cannot change any more.
        KilnError: The model is nowhere, or it cannot be compiled or loaded.
    """
    found = await _find(services, model, given)
    build = (
        await ModelBuild.plan(services, found, given, batch_size=batch_size) if isinstance(found, Checkpoint) else found
    )
    return await _load(services, build, view, may_replace=may_replace, deployment_id=deployment_id)


async def prepare_quickly(
    services: StackRecord,
    model: Checkpoint | str,
    given: Given,
    batch_size: int,
    view: PreparationView,
    *,
    may_replace: bool,
) -> Deployment | QuickStart:
    """Makes a model ready to answer as soon as it can be; takes and raises what `prepare` does.

    Returns:
        Something that answers until the model is compiled, if that is quicker and the person says nothing of the
        configuration.
    """
    found = await _find(services, model, given)
    if isinstance(found, CompiledModel):
        return await _load(services, found, view, may_replace=may_replace)
    build = await ModelBuild.plan(services, found, given, batch_size=batch_size)
    if not given.says_something and await is_quicker(services, build):
        return await QuickStart.open(services, found, given, build, progress=view)
    return await _load(services, build, view, may_replace=may_replace)


async def _load(
    services: StackRecord,
    model: ModelBuild | CompiledModel,
    view: PreparationView,
    *,
    may_replace: bool,
    deployment_id: str | None = None,
) -> Deployment:
    compiled = model if isinstance(model, CompiledModel) else await compile_model(services, model, progress=view)
    deployment = await load_model(
        services, compiled, may_replace=may_replace, progress=view, deployment_id=deployment_id
    )
    if isinstance(model, ModelBuild):
        await end_quick(services, model)
    return deployment


async def _find(services: StackRecord, model: Checkpoint | str, given: Given) -> Checkpoint | CompiledModel:
    if isinstance(model, Checkpoint):
        return model
    roots = [Path(root) for root in services.model_roots]
    async with AsyncBundles(services.compiler, **services.connection) as bundles:
        found = await find_named(model, bundles, roots)
    if isinstance(found, Checkpoint):
        return found
    if given.says_something:
        raise click.UsageError(f"{model} is a bundle: --config, --override and -O come too late")
    return take_bundle(model, found)


class PreparationView:
    """Shows how a model gets ready, while it is open: configuration, compile, load."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._progress = ProgressView(output)

    def configured(self, configuration: Configuration) -> None:
        """Shows the values that no person gave."""
        self._output.event("configured", {"config": dict(configuration.document)})
        values = ", ".join(f"{name} {_text(value)}" for name, value in configuration.derived.items())
        self._output.remark(f"configuration: {values}" if values else "configuration: as given")

    def compiled(self, progress: CompileMetadata) -> None:
        """Shows the next state of a compile."""
        self._progress.compiled(progress)

    def lost(self, error: Unavailable) -> None:
        """Shows that the connection was lost and will be opened again."""
        self._progress.lost(error)

    def unloaded(self, deployment_id: str) -> None:
        """Says what made room."""
        self._output.event("unloaded", {"deployment_id": deployment_id})
        self._output.remark(f"unloaded {deployment_id}, which was idle, to make room")

    def loaded(self, progress: LoadProgress) -> None:
        """Shows the next state of a load."""
        self._progress.loaded(progress)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)


def _text(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case list():
            return "/".join(map(str, value))
        case dict():
            return " ".join(f"{name} {_text(one)}" for name, one in value.items())
        case _:
            return str(value)
