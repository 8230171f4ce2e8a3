"""A submodel as JSON, for the interpreter that lowers it for Neuron."""

from __future__ import annotations

from compiler_svc.builds.build import Build
from compiler_svc.lower.job import NeuronSubmodel
from compiler_svc.lower.neuron.flags import CompilerOptions, list_flags
from compiler_svc.trace.submodel_document import MAKE_MODULE
from compiler_svc.trace.submodels import ExecutableSpec
from targets.neuron import NEURON_PYTHON


def describe_for_neuron(build: Build, submodel: ExecutableSpec, toolchain: dict[str, str]) -> NeuronSubmodel | None:
    """Describes a submodel for the interpreter with Neuron's packages; None if this one lowers for the target.

    Args:
        toolchain: Versions of what makes the executables.
    """
    spec, config = build.spec, build.spec.config.neuron_config
    interpreter = spec.toolchain.interpreter
    if interpreter is None:
        return None
    return NeuronSubmodel(
        make_module=MAKE_MODULE,
        document=build.plan.write_submodel(build.checkpoint.config, submodel),
        flags=list_flags(
            submodel.submodel,
            CompilerOptions(
                logical_nc_config=config.logical_nc_config,
                cc_pipeline_tiling_factor=config.cc_pipeline_tiling_factor,
                scratchpad_page_size=config.scratchpad_page_size,
                max_context_length=config.max_context_length,
            ),
            optimization_level=spec.optimization_level,
            target=spec.target.kind,
            compiler_version=toolchain[f"{NEURON_PYTHON.name}.neuronx-cc"],
        ),
        logical_nc_config=config.logical_nc_config,
        tp_degree=build.plan.model.tp_degree,
    )
