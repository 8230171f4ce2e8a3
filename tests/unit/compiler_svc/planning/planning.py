"""Plans of real models' shapes, from headers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bundle.store.layout import Layout
from compiler_svc.config import InferenceConfig, resolve_config
from compiler_svc.database.engine import Database
from compiler_svc.planning.admission import CompileRequest
from compiler_svc.planning.planner import Planner, PlannerSettings, PlanRequest
from compiler_svc.planning.report import PlanReport

GIB = 1 << 30


@contextmanager
def open_planner(directory: Path, models: Path) -> Iterator[Planner]:
    """A planner with an empty cache and an empty store."""
    url = f"sqlite:///{directory / 'kiln.db'}"
    store = Layout.create(directory / "store").root
    settings = PlannerSettings(database_url=url, store=store, model_roots=(models,), num_lowerings=2, default_isa="")
    with closing(Database(url)) as database:
        yield Planner(database, settings)


def request(model: str, target: str = "trn1", **options: Any) -> PlanRequest:
    """A request. Options that are no fields of it are attributes of `neuron_config`."""
    fields = {"isa": "", "optimization_level": 0, "salt": "", "core_memory_bytes": None}
    document = options.pop("document", None)
    fields |= {name: options.pop(name) for name in list(options) if name in fields}
    return PlanRequest(model=model, target_kind=target, document=document or {"neuron_config": options}, **fields)


def compile_request(model: str = "tiny", **fields: Any) -> CompileRequest:
    given: dict[str, Any] = {"isa": "", "optimization_level": 1, "salt": "", "skip_cache_lookup": False}
    given |= {"document": {"neuron_config": {"seq_len": 64}}}
    return CompileRequest(name="tiny", model=model, target_kind="cpu", **(given | fields))


def plan(planner: Planner, model: str, target: str = "trn1", **options: Any) -> PlanReport:
    return planner.plan(request(model, target, **options))


def resolve(target: str = "trn1", **neuron_config: Any) -> InferenceConfig:
    return resolve_config({"neuron_config": neuron_config}, checkpoint_dtype="bfloat16", target=target).config
