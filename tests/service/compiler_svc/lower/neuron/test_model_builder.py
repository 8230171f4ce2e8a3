"""The front end `model_builder`, with doubles of Neuron's packages by their recorded signatures.

In this process where an error counts, and in an interpreter of its own where that does.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Final

import pytest
import torch

from bundle.abi.inputs import INPUTS
from bundle.manifest import Target
from bundle.neff import read_neff
from compiler_svc.lower.errors import (
    LoweringError,
    NeuronCompilerFailed,
    NeuronGraphRefused,
    NeuronMemoryExceeded,
    NeuronTraceFailed,
)
from compiler_svc.lower.job import LoweringJob, LoweringOptions, NeuronSubmodel
from compiler_svc.lower.neuron import model_builder
from compiler_svc.lower.neuron.flags import CompilerOptions, list_flags
from compiler_svc.lower.neuron.hlo import read_hlo
from compiler_svc.lower.neuron.interpreter import lower_submodel, make_request
from compiler_svc.lower.neuron.model_builder import compile_submodel
from compiler_svc.lower.neuron.request import NeuronExecutable
from compiler_svc.models.transforms import UNCHANGED
from compiler_svc.trace.graph_spec import GraphSpec
from compiler_svc.trace.named_submodel import make_named_submodel
from compiler_svc.trace.submodel_document import MAKE_MODULE, write_document
from compiler_svc.trace.submodels import ExecutableSpec, describe_state, describe_submodel
from targets.errors import NeuronToolchainMissing
from targets.neuron import NEURON_PYTHON, TRN2
from targets.registry import TARGETS
from tests.checkpoints.tiny_models import GEOMETRIES, TinyModel, write_tiny_model
from tests.neuron.hlo_modules import SOURCE
from tests.neuron.standin import SITE, make_interpreter
from tests.ranks.stepping import load_shard, run_eagerly
from tests.unit.compiler_svc.sharding.test_ranks import make_sampling

OPTIONS: Final = CompilerOptions(
    logical_nc_config=2,
    cc_pipeline_tiling_factor=2,
    scratchpad_page_size=None,
    max_context_length=32,
    dtypes=frozenset(),
)
#: Submodel, bucket.
SUBMODELS: Final = [("context_encoding", 16), ("token_generation", 32)]


Compile = Callable[[LoweringJob], NeuronExecutable]
Stage = Callable[..., LoweringJob]
Order = Callable[..., object]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), GEOMETRIES["gqa-llama3-tied"])


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = make_interpreter(tmp_path)
    monkeypatch.setenv(NEURON_PYTHON.variable, str(program))
    return program


@pytest.fixture
def neuronx_cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Says how the compiler's next run ends."""
    path = tmp_path / "neuronx_cc.json"
    monkeypatch.setenv("NEURON_TEST_NEURONX_CC", str(path))

    return lambda **orders: path.write_text(json.dumps(orders))


def write(tiny: TinyModel, spec: GraphSpec, submodel: ExecutableSpec) -> dict[str, Any]:
    tensors = tiny.plan(tp_degree=spec.tp_degree).describe_shard(0, None, 0).tensors
    return write_document(tiny.checkpoint.config, spec, tensors, submodel, changes=UNCHANGED)


def stage(
    tiny: TinyModel,
    directory: Path,
    *,
    submodel: tuple[str, int] = SUBMODELS[1],
    make_module: str = MAKE_MODULE,
    document: Mapping[str, Any] | None = None,
    **changes: Any,
) -> LoweringJob:
    spec = tiny.spec(**changes)
    described = describe_submodel(spec, *submodel)  # type: ignore[arg-type]
    flags = list_flags(described.submodel, OPTIONS, optimization_level=1, target="trn2", compiler_version="2.27.5334.0")
    directory.mkdir(exist_ok=True)
    return LoweringJob(
        tag=described.tag,
        directory=directory,
        cache_dir=directory,
        num_state=len(described.state),
        constants=(),
        reserved_bytes=0,
        options=LoweringOptions(optimization_level=1, target=Target(kind="trn2", isa="")),
        neuron=NeuronSubmodel(
            make_module=make_module,
            document=dict(document or write(tiny, spec, described)),
            flags=flags,
            logical_nc_config=2,
            tp_degree=spec.tp_degree,
        ),
    )


@pytest.fixture
def compile_here(monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Runs the front end in this process."""
    monkeypatch.syspath_prepend(SITE)

    def run(job: LoweringJob) -> NeuronExecutable:
        monkeypatch.chdir(job.directory)
        return compile_submodel(make_request(job))

    return run


@pytest.fixture
def stage_one(tiny: TinyModel, tmp_path: Path) -> Stage:
    """Stages a submodel of the tiny model; see `stage`."""
    return partial(stage, tiny, tmp_path / "job")


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("submodel", SUBMODELS, ids=lambda one: one[0])
def test_a_submodel_becomes_a_neff(
    stage_one: Stage, tiny: TinyModel, compile_here: Compile, submodel: tuple[str, int], tp_degree: int
) -> None:
    spec = tiny.spec(tp_degree=tp_degree)
    executable = compile_here(stage_one(submodel=submodel, tp_degree=tp_degree))
    described, program = describe_submodel(spec, *submodel), executable.program  # type: ignore[arg-type]
    assert (facts := read_neff(executable.neff, described.tag)).lnc == 2
    assert facts.architecture == "cayman"

    assert [one.tensor for one in program.inputs if one.kind == "input"] == [one.name for one in described.inputs]
    shard = tiny.plan(tp_degree=tp_degree).describe_shard(0, None, 0)
    weights = {one.tensor: (one.dtype, one.shape) for one in program.inputs if one.kind == "weight"}
    # Logits of all ranks need not know the rank.
    unused = {"rank_util.rank"}
    assert weights == {one.name: (one.dtype, one.shape) for one in shard.tensors if one.name not in unused}
    state = {one.name: one.shape for one in describe_state(spec).tensors}
    assert {one.tensor: one.shape for one in program.inputs if one.kind == "state"} == state
    taken = {one.name: one.tensor for one in program.inputs}
    assert {taken[one.alias]: one.tensor for one in program.outputs if one.kind == "state"} == {
        name: name for name in state
    }
    assert [one.tensor for one in program.outputs if one.kind == "output"] == ["logits"]
    assert program.is_collective == (tp_degree > 1)

    (arguments,) = Path().rglob("compiler_args.txt")
    assert shlex.split(arguments.read_text()) == [*program.compiler_flags]
    entered = json.loads(Path("parallel_state.json").read_text())
    assert (entered["world_size"], entered["tensor_model_parallel_size"]) == (tp_degree, tp_degree)
    assert entered["lnc_size"] == 2
    assert executable.metaneff.stat().st_size


def test_what_is_compiled_has_no_lines_of_this_host(
    stage_one: Stage, compile_here: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(model_builder, "read_hlo", lambda data: (read.append(data), read_hlo(data))[1])
    executable = compile_here(stage_one())
    compiled = executable.graph.read_bytes()
    assert [path.read_bytes() for path in Path().rglob("*.hlo_module.pb")] == [compiled]
    assert (SOURCE in read[0], SOURCE in compiled) == (True, False)
    assert [op.opcode for op in read_hlo(compiled).entry.instructions.values()] == [
        op.opcode for op in read_hlo(read[0]).entry.instructions.values()
    ]


def test_greedy_tokens_and_blocks(stage_one: Stage, compile_here: Compile) -> None:
    changes = {"output_logits": False, "num_blocks": 12, "block_tokens": 32, "sampling": make_sampling(temperature=0.0)}
    program = compile_here(stage_one(**changes)).program
    taken = [one.tensor for one in program.inputs if one.kind == "input"]
    assert {"slot_mapping", "active_block_table"} <= set(taken)
    assert [(one.tensor, one.dtype) for one in program.outputs if one.kind == "output"] == [("tokens", "int32")]


class TestTheModule:
    """What a front end traces computes what the submodel computes."""

    @pytest.mark.parametrize("submodel", SUBMODELS, ids=lambda one: one[0])
    @torch.no_grad()
    def test_outputs_and_state(self, tiny: TinyModel, submodel: tuple[str, int]) -> None:
        spec = tiny.spec()
        described = describe_submodel(spec, *submodel)  # type: ignore[arg-type]
        made = make_named_submodel(write(tiny, spec, described))
        shard = load_shard(tiny.plan(), tiny.checkpoint)
        made.module.load_state_dict(shard, strict=False)
        generator = torch.Generator().manual_seed(5)
        inputs = {name: torch.ones_like(tensor) for name, tensor in made.examples.items()}
        state = [torch.randn(one.shape, generator=generator) for one in made.state]
        for spec_of_state, tensor in zip(made.state, state, strict=True):
            made.module.get_buffer(spec_of_state.name).copy_(tensor)
        before = {one.name: made.module.get_buffer(one.name) for one in made.state}
        kept = {name: tensor.clone() for name, tensor in before.items()}
        results = made.module(**inputs)
        expected = run_eagerly(spec, tiny.plan(), described, shard)(*inputs.values(), *state)
        new_state = [made.module.get_buffer(one.name) for one in made.state]
        for one, other in zip((*results, *new_state), expected, strict=True):
            assert torch.equal(one, other)
        assert any(not torch.equal(made.module.get_buffer(name), tensor) for name, tensor in kept.items())
        assert all(torch.equal(before[name], tensor) for name, tensor in kept.items()), "never written in place"

    def test_all_submodels_have_one_signature_with_every_input(self, tiny: TinyModel) -> None:
        for submodel in SUBMODELS:
            made = make_named_submodel(write(tiny, tiny.spec(), describe_submodel(tiny.spec(), *submodel)))  # type: ignore[arg-type]
            parameters = inspect.signature(made.module.forward).parameters
            assert list(parameters) == list(INPUTS)
            assert {one.default for one in parameters.values()} == {None}
            assert {one.kind for one in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}

    def test_weights_and_buffers_have_their_own_names(self, tiny: TinyModel) -> None:
        spec = tiny.spec()
        made = make_named_submodel(write(tiny, spec, describe_submodel(spec, "token_generation", 32)))
        assert dict(made.module.named_parameters()).keys() == made.weights
        assert dict(made.module.named_buffers()).keys() == {one.name for one in describe_state(spec).tensors}
        assert {one.name for one in describe_state(spec).tensors} <= made.module.state_dict().keys(), "persistent"

    def test_another_description_is_refused(self, tiny: TinyModel, stage_one: Stage, compile_here: Compile) -> None:
        spec = tiny.spec()
        document = write(tiny, spec, describe_submodel(spec, "token_generation", 32))
        document["model_config"] = document["model_config"] | {"rms_norm_eps": 0.5}
        with pytest.raises(LoweringError, match="token_generation_32 is described in another way"):
            compile_here(stage_one(document=document))


class TestWhatUpstreamRefuses:
    """Each recorded failure has a name, with the submodel, here."""

    @pytest.mark.parametrize(
        ("module", "cause", "advice"),
        [
            ("make_unused", "RuntimeError: HLO |caused by ValueError: |not found in lowering context", "is not used"),
            ("make_in_place", "parameter not found in lowering context", "an operation writes one in place"),
            ("make_variadic", "NotImplementedError", "names each of its inputs"),
            ("make_default", "ValueError", "no default but None"),
        ],
    )
    def test_tracing(self, stage_one: Stage, compile_here: Compile, module: str, cause: str, advice: str) -> None:
        job = stage_one(make_module=f"tests.neuron.refused_modules:{module}")
        with pytest.raises(NeuronTraceFailed) as failed:
            compile_here(job)
        assert failed.value.metadata["tag"] == "token_generation_32"
        assert all(part in str(failed.value) for part in cause.split("|"))
        assert advice in str(failed.value)

    @pytest.mark.parametrize(
        ("module", "finding"),
        [
            ("make_double", "NCC_ESPP004: .* of f64"),
            ("make_integer_power", "NCC_EVRF062: power .* of s64"),
            ("make_lasting_buffer", "buffer k_cache.0 is no alias"),
            ("make_unnamed_output", "output1 has data type 1 and is no output of the submodel"),
            ("make_other_weight", "weight 'stranger' is in no shard"),
        ],
    )
    def test_graphs(
        self, stage_one: Stage, compile_here: Compile, neuronx_cc: Order, module: str, finding: str
    ) -> None:
        neuronx_cc(error="it was called")
        job = stage_one(make_module=f"tests.neuron.refused_modules:{module}")
        with pytest.raises(NeuronGraphRefused, match=f"would refuse token_generation_32: .*{finding}"):
            compile_here(job)

    def test_a_buffer_that_other_graphs_write(self, stage_one: Stage, compile_here: Compile) -> None:
        made = compile_here(stage_one(make_module="tests.neuron.refused_modules:make_read_buffer"))
        read = {one.tensor for one in made.program.inputs if one.kind == "state"}
        assert read - {one.tensor for one in made.program.outputs if one.kind == "state"} == {"k_cache.0"}

    def test_tensors_beyond_a_core(
        self, stage_one: Stage, compile_here: Compile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(TARGETS, "trn2", replace(TRN2, core_bytes=1000))  # type: ignore[arg-type]
        with pytest.raises(NeuronMemoryExceeded, match=r"NCC_EVRF009.*at most the 2000 bytes of a core") as failed:
            compile_here(stage_one())
        assert failed.value.metadata["codes"] == "NCC_EVRF009"

    @pytest.mark.parametrize(
        ("orders", "kind", "codes"),
        [
            ({"error": "exit code 70", "log": "[NCC_EVRF001] Operator rng is not supported"}, NeuronCompilerFailed,
             "NCC_EVRF001"),
            ({"error": "exit code 70: NCC_INLA001"}, NeuronCompilerFailed, "NCC_INLA001"),
            ({"error": "exit code 70", "log": "NCC_EOOM002: memory"}, NeuronMemoryExceeded, "NCC_EOOM002"),
            ({"error": "exit code 70", "log": "NCC_EVRF009 and NCC_EOOM001"}, NeuronMemoryExceeded,
             "NCC_EOOM001, NCC_EVRF009"),
            # What no graph shows, or not to us: the compiler's own word for it.
            ({"error": "NCC_EARG001 NCC_EHCA005 NCC_EVRF052 NCC_EVRF059 NCC_EVRF060 NCC_EVRF065"}, NeuronCompilerFailed,
             "NCC_EARG001, NCC_EHCA005, NCC_EVRF052, NCC_EVRF059, NCC_EVRF060, NCC_EVRF065"),
            ({"error": "Killed"}, NeuronCompilerFailed, ""),
        ],
    )  # fmt: skip
    def test_compiling(
        self,
        stage_one: Stage,
        compile_here: Compile,
        neuronx_cc: Order,
        *,
        orders: dict[str, str],
        kind: type,
        codes: str,
    ) -> None:
        neuronx_cc(**orders)
        with pytest.raises(NeuronCompilerFailed) as failed:
            compile_here(stage_one())
        assert type(failed.value) is kind
        assert (failed.value.metadata["tag"], failed.value.metadata["codes"]) == ("token_generation_32", codes)
        assert orders["error"] in str(failed.value)
        assert orders.get("log", "") in str(failed.value), "the tail of the compiler's log"
        assert str(Path.cwd()) not in str(failed.value), "no client sees the host's directories"

    @pytest.mark.parametrize(
        ("order", "cause", "told"),
        [
            (("error", "neuronx-cc failed with 70"), "exit code 70", "(exit code 70"),
            (("error", "neuronx-cc failed with -9"), "SIGKILL", "(SIGKILL; the kernel ends processes so when a host"),
            (("program", "bytearray(200 << 20); raise SystemExit(3)"), "exit code 3", "(exit code 3; its largest"),
            (("program", "import os; os.kill(os.getpid(), 6)"), "SIGABRT", "(SIGABRT; its largest process had "),
            (("error", "no reason"), "", "neuronx-cc failed on token_generation_32"),
        ],
    )
    def test_how_it_ended(
        self,
        stage_one: Stage,
        compile_here: Compile,
        neuronx_cc: Order,
        *,
        order: tuple[str, str],
        cause: str,
        told: str,
    ) -> None:
        neuronx_cc(**dict([order]))
        with pytest.raises(NeuronCompilerFailed) as failed:
            compile_here(stage_one())
        assert failed.value.metadata["cause"] == cause
        assert told in str(failed.value)
        assert int(failed.value.metadata["peak_bytes"]) >= (200 << 20 if "bytearray" in order[1] else 0)

    def test_only_the_end_of_a_long_log(self, stage_one: Stage, compile_here: Compile, neuronx_cc: Order) -> None:
        neuronx_cc(error="exit code 70", log="\n".join(f"line {number} {'x' * 200}" for number in range(500)))
        with pytest.raises(NeuronCompilerFailed) as failed:
            compile_here(stage_one())
        assert "line 499 " in str(failed.value)
        assert "line 480 " not in str(failed.value)
        assert len(str(failed.value)) < 2500


class TestTheInterpreter:
    @pytest.mark.parametrize("path", ["/nowhere/python", "/bin/false"])
    def test_that_does_not_start(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        monkeypatch.setenv(NEURON_PYTHON.variable, path)
        with pytest.raises(NeuronToolchainMissing, match=f"{path} has no Python that starts"):
            NEURON_PYTHON.read_versions()

    def test_versions(self, interpreter: Path) -> None:
        versions = NEURON_PYTHON.read_versions()
        assert versions["neuron.neuronx-cc"] == "2.27.5334.0"
        assert versions["neuron.torch-neuronx"] == "2.9.0.2.15.32035"
        assert versions.keys() == {
            f"neuron.{name}" for name in ("python", *NEURON_PYTHON.choices, *NEURON_PYTHON.distributions)
        }

    def test_it_lowers_with_our_sources_and_no_others_of_this_process(
        self, stage_one: Stage, tmp_path: Path, interpreter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", "/somewhere/with/another/torch")
        executable = lower_submodel(stage_one())
        assert (executable.format, executable.state_convention) == ("neff", "aliased")
        assert executable.neff is not None
        assert set(executable.constants) == {one.tensor for one in executable.neff.inputs if one.kind == "weight"}
        assert read_neff(executable.path, executable.tag).lnc == 2
        assert executable.companions.keys() == {"hlo", "metaneff"}
        sources = tmp_path / "job/sources"
        assert sorted(one.name for one in sources.iterdir()) == ["bundle", "compiler_svc", "execution", "targets"]

    def test_its_errors_arrive(self, stage_one: Stage, interpreter: Path) -> None:
        job = stage_one(make_module="tests.neuron.refused_modules:make_double")
        with pytest.raises(NeuronGraphRefused, match="NCC_ESPP004"):
            lower_submodel(job)

    def test_a_fault_of_its_own_ends_the_lowering(self, stage_one: Stage, interpreter: Path) -> None:
        job = stage_one(make_module="tests.neuron.refused_modules:make_nothing")
        with pytest.raises(CalledProcessError):
            lower_submodel(job)
