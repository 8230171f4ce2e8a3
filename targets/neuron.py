"""AWS Inferentia and Trainium, as their documents describe them. No such hardware has run what Kiln compiles."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from targets.neuron_releases import APT_PINS, PYTHON_PINS, RUNTIME_PACKAGE
from targets.target import ExecutableFormat, Lowering, Target
from targets.toolchain import Choice, Interpreter, Toolchain

_GIB: Final = 1 << 30

#: Graphs for Neuron order up to so many candidates by comparing each with each. More of them need a sort, which
#: neuronx-cc refuses for trn2 and trn3 (NCC_EVRF029).
MAX_CANDIDATES: Final = 1024
#: From this length of sequences on, NxD Inference has other settings of neuronx-cc and of libnrt.
LONG_CONTEXT_TOKENS: Final = 32 * 1024


class TopKRecord(NamedTuple):
    """Rows of so many columns, of which neuronx-cc is on record to take so many candidates by AwsNeuronTopK."""

    columns: int
    candidates: int


#: Of neuronx-cc 2.26. More candidates of the wider rows end in ISGV902; of more than these nothing is known.
RECORDED_TOP_K: Final = (TopKRecord(16_384, 32), TopKRecord(32_768, 8))
#: Ways to take candidates, and how many one call then takes: all of them, or as many as are on record.
TOP_K_WAYS: Final[Mapping[str, int | None]] = MappingProxyType(
    {"single": None, "recorded": RECORDED_TOP_K[0].candidates}
)

#: Its sizes are a guess that has not been verified.
NEFF: Final = ExecutableFormat(
    name="neff",
    media_type="application/vnd.kiln.executable.v1.neff",
    suffix=".neff",
    state_convention="aliased",
    # The host's processor does not run it; what runs it is checked by the executor.
    is_native=False,
    executor="execution.executors.neuron.executor:load_neuron_executor",
    core_variable="NEURON_RT_VISIBLE_CORES",
    core_size_variable="NEURON_LOGICAL_NC_CONFIG",
    core_counter="execution.executors.neuron.host",
    meeting_variable="NEURON_RT_ROOT_COMM_ID",
    # The documents name three defaults of libnrt, 2, 30 and 600 s. Most steps take a second at most, and a hang never
    # ends; NxD Inference waits 600 s where contexts are as long as here.
    step_timeouts=((0, 30.0), (LONG_CONTEXT_TOKENS, 600.0)),
    # A minute for its turn to call nrt_init, one for a core that another process gives back, and one for the calls.
    load_timeout_s=180.0,
    fixed_code_bytes=8 << 20,
    layer_code_bytes=1 << 20,
)
#: Traces graphs and writes weights, as for every target.
_TORCH: Final = ("torch",)
#: What was chosen to make NEFFs of submodels; see `compiler_svc.lower.neuron.request.FRONT_ENDS`.
FRONT_END: Final = "front-end"
#: What was chosen of `TOP_K_WAYS`.
TOP_K: Final = "top-k"
#: The Python with Neuron's packages. They need another torch than the compiler.
NEURON_PYTHON: Final = Interpreter(
    name="neuron",
    variable="KILN_COMPILER_NEURON_PYTHON",
    pins=tuple(PYTHON_PINS.items()),
    choices={
        FRONT_END: Choice("KILN_COMPILER_NEURON_FRONT_END", default="model_builder"),
        TOP_K: Choice("KILN_COMPILER_NEURON_TOP_K", default="single"),
    },
    # It imports nki, nkilib and boto3 besides.
    entry_module="neuronx_distributed.trace.functions",
)
#: Packages of Neuron's apt repository: the driver of hosts; what ranks load, and what several ranks of one bundle load
#: besides; the programs that show cores.
DRIVER_PACKAGE: Final = ("aws-neuronx-dkms", APT_PINS["aws-neuronx-dkms"])
LIBRARY_PACKAGES: Final = tuple((name, APT_PINS[name]) for name in (RUNTIME_PACKAGE, "aws-neuronx-collectives"))
TOOLS_PACKAGE: Final = ("aws-neuronx-tools", APT_PINS["aws-neuronx-tools"])
_COMPILED: Final = (
    Lowering(
        format=NEFF,
        backend="compiler_svc.lower.neuron.interpreter:lower_submodel",
        toolchain=Toolchain(distributions=_TORCH, interpreter=NEURON_PYTHON),
    ),
) * 3

# The degrees come from NxD Inference's documents, which say that the Neuron runtime has them. The older guide of
# Transformers NeuronX lacks 16 for trn1. The memory of a core comes from the documents too: 16 GB on inf2 and trn1,
# 24 GB on trn2 with LNC 2, that is, for two physical cores.

INF2: Final = Target(kind="inf2", tp_degrees=(1, 2, 4, 8, 24), core_bytes=16 * _GIB, lowerings=_COMPILED)

TRN1: Final = Target(kind="trn1", tp_degrees=(1, 2, 8, 16, 32), core_bytes=16 * _GIB, lowerings=_COMPILED)

TRN2: Final = Target(
    kind="trn2",
    tp_degrees=(1, 2, 4, 8, 16, 32, 64),
    core_bytes=12 * _GIB,
    logical_core_sizes=(2, 1),
    max_candidates=MAX_CANDIDATES,
    lowerings=_COMPILED,
)

TRN3: Final = Target(
    kind="trn3",
    tp_degrees=TRN2.tp_degrees,
    tp_degrees_note="those of trn2 because no document lists them",
    core_bytes=18 * _GIB,
    logical_core_sizes=(2, 1),
    max_candidates=MAX_CANDIDATES,
    lowerings=_COMPILED,
    note="target.kind: trn3's 36 GiB of a core with LNC 2 and its tp degrees are unverified",
)
