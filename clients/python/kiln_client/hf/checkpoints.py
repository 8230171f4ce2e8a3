"""Makes a checkpoint ready to answer on the services of a home, as `kiln run` does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kiln_client.blocking import loop_thread
from kiln_client.cli.local.background import reach_services
from kiln_client.cli.local.configuration import Given
from kiln_client.cli.local.lookup import Checkpoint, is_checkpoint
from kiln_client.cli.local.preparation import Preparation, find_here
from kiln_client.cli.output import Output
from kiln_client.cli.progress import ProgressView
from kiln_client.errors import ModelNotFound
from kiln_client.stack.home import HOME_VARIABLE, default_home

#: Rows of the KV cache: prompts of a batch that are computed together.
_BATCH_SIZE: Final = 4
#: The host picks the tokens, so that every sampling parameter is served, and logits can be asked for.
_SERVES_ALL: Final[Mapping[str, Any]] = {"on_device_sampling_config": None}


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A checkpoint that a deployment serves; `address` and `connection` are those of its runtime."""

    path: Path
    deployment_id: str
    address: str
    connection: Mapping[str, Any]


def prepare_deployment(
    model: str, home: Path | None, neuron_config: Mapping[str, Any], optimization_level: int | None
) -> ReadyModel:
    """Finds a checkpoint here or at the Hub, compiles and loads it, and shows the progress on standard error.

    Raises:
        ModelNotFound: There is no such checkpoint.
        KilnError: It cannot be compiled or loaded.
    """
    home = home or Path(os.environ.get(HOME_VARIABLE) or default_home())
    output = Output(as_json=False)
    if is_checkpoint(Path(model)):
        found: Checkpoint | None = Checkpoint.open(Path(model))
    else:
        found = find_here(output, model, [home / "models"], home, yes=True)
    if found is None:
        raise ModelNotFound(model, "a directory of a checkpoint, or the id of a model of the Hub, ORG/NAME")
    given = Given(
        {"neuron_config": {**_SERVES_ALL, **neuron_config}}, is_file=False, optimization_level=optimization_level
    )
    return loop_thread.run(_prepare(output, found, home, given))


async def _prepare(output: Output, model: Checkpoint, home: Path, given: Given) -> ReadyModel:
    services = await reach_services(home, model.roots, output.remark)
    with ProgressView(output) as view:
        preparation = Preparation(services, given, _BATCH_SIZE, view, may_replace=services.is_detached)
        deployment = await preparation.prepare(model)
    return ReadyModel(model.path, deployment.id, services.runtime, services.connection)
