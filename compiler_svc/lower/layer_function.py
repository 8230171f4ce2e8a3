"""`kiln::call_layer` in a library: one C++ function for each layer that a graph repeats, and the calls of it. Inductor
has no functions in the code that it writes for libraries; it would write a subgraph anew at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch._inductor import compile_fx, ir
from torch._inductor.codegen.common import get_device_op_overrides
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.lowering import register_lowering
from torch._inductor.output_code import CompiledAOTI
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from compiler_svc.lower.errors import ProgramUnsupported
from compiler_svc.lower.repeated_layers import CALL_LAYER

#: Layers after the passes of Inductor, by name.
_PREPARED: Final[dict[str, GraphModule]] = {}
#: What a graph's lowering has made of layers, by name.
_FUNCTIONS: Final[WeakKeyDictionary[GraphLowering, dict[str, _LayerFunction]]] = WeakKeyDictionary()


def prepare_layer(name: str, layer: GraphModule) -> None:
    """Runs the passes of Inductor on a layer, before a graph that calls it is lowered. Valid inside `steered`."""

    def keep(module: GraphModule, inputs: Sequence[Any], **_: Any) -> CompiledAOTI:
        # What compile_fx_inner does before it lowers a graph.
        compile_fx.view_to_reshape(module)
        with V.set_fake_mode(compile_fx.fake_tensor_prop(module, inputs)):
            compile_fx._recursive_record_original_output_strides(module)  # noqa: SLF001
            compile_fx._recursive_post_grad_passes(module, is_inference=True)  # noqa: SLF001
        _PREPARED[name] = module
        return CompiledAOTI("", "cpu")

    inputs = [node.meta["val"] for node in layer.graph.find_nodes(op="placeholder")]
    # compile_fx changes what it is given, and the operator's fake reads the layer.
    own = GraphModule(layer, deepcopy(layer.graph))
    with V.set_aot_compilation(True):
        compile_fx.compile_fx(own, inputs, inner_compile=keep, config_patches={"cpp_wrapper": True})


class _LayerFunction(SubgraphLowering):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        module, parent = _PREPARED[name], V.graph
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        super().__init__(
            parent=parent,
            gm=module,
            example_inputs=inputs,
            shape_env=parent._shape_env,  # noqa: SLF001 - as GraphLowering.make_subgraph does
            cpp_wrapper=True,
            aot_mode=True,
            is_inference=True,
            name=f"kiln_layer_{name}",
        )
        self._is_written = False
        with V.set_graph_handler(self):
            self.run(*inputs)
        if self.constants:
            raise ProgramUnsupported(f"constant {next(iter(self.constants))!r}", "appeared in a layer's compilation")

    def init_wrapper_code(self, *_: Any, **__: Any) -> None:
        self.device_type = "cpu"
        self.device_ops = get_device_op_overrides("cpu")
        self.wrapper_code = _FunctionWrapper(self.name, self.parent.wrapper_code)

    def write(self) -> None:
        """Writes the function into the code of the graph that calls it, unless it is there."""
        if self._is_written:
            return
        self._is_written = True
        with V.set_graph_handler(self):
            self.codegen()


class _FunctionWrapper(CppWrapperCpu):  # type: ignore[misc]
    """Writes a function instead of a library's code."""

    def __init__(self, function: str, parent: CppWrapperCpu) -> None:
        self._function = function
        self._parent = parent
        super().__init__()
        for shared in (
            "header",
            "kernel_declarations",
            "src_to_kernel",
            "included_devices",
            "used_cached_devices",
            "used_cached_dtypes",
            "used_cached_layouts",
            "used_cached_memory_formats",
            "initialized_kernels",
        ):
            setattr(self, shared, getattr(parent, shared))

    def write_header(self) -> None:
        """The library's code has it."""

    def write_prefix(self) -> None:
        """The library's code has it."""

    def next_kernel_suffix(self) -> str:
        """Kernels have names of their own in a library."""
        suffix: str = self._parent.next_kernel_suffix()
        return suffix

    def codegen_device_idx(self, *_: Any) -> str:
        """The library's code reads it from the model, which the function does not have."""
        return "-1"

    def codegen_free(self, buffer: Any) -> None:
        """Keeps what belongs to the caller."""
        if not isinstance(buffer, ir.InputBuffer):
            super().codegen_free(buffer)

    def generate(self, is_inference: bool) -> None:
        """Writes the function."""
        with self.wrapper_call.indent():
            for index, name in enumerate(V.graph.graph_inputs):
                self.wrapper_call.writeline(f"[[maybe_unused]] const ConstantHandle {name}(input_handles[{index}]);")
            self.run_wrapper_ir_passes(is_inference)
            with self.set_writeline(self.wrapper_call, self.wrapper_call.writeline) as write:
                for line in self.lines:
                    write(line)
            self.generate_return(self.get_output_refs())
        code = self._parent.prefix
        code.writeline(f"AOTI_NOINLINE static void {self._function}(")
        code.writeline("    const AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {")
        code.splice(self.wrapper_call)
        code.writeline("}")


class _LayerCall(ir.ExternKernelAlloc):  # type: ignore[misc]
    """A call of a layer's function in the generated code."""

    def __init__(self, function: _LayerFunction, inputs: Sequence[Any], state: Sequence[Any]) -> None:
        (value,) = function.graph_outputs
        device = value.get_device()
        layout = ir.FixedLayout(device, value.get_dtype(), value.get_size(), value.get_stride())
        super().__init__(layout, inputs)
        self.function = function
        self.mutation_outputs = [ir.MutationOutput(ir.NoneLayout(device=device), one, self) for one in state]

    def codegen(self, wrapper: CppWrapperCpu) -> None:
        """Writes the call into the library's code, and before it the function if it is the first call."""
        self.function.write()
        name = self.get_name()
        # As temporaries, views of buffers live until the call ends.
        inputs = ", ".join(one.codegen_reference() for one in self.inputs)
        array = f"std::array<AtenTensorHandle, {len(self.inputs)}>{{{inputs}}}.data()"
        wrapper.writeline(f"AtenTensorHandle {name}_handle;")
        wrapper.writeline(f"{self.function.name}({array}, &{name}_handle);")
        wrapper.writeline(f"RAIIAtenTensorHandle {name}({name}_handle);")


@register_lowering(CALL_LAYER, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lower_call(name: str, reads: Sequence[Any], state: Sequence[Any]) -> Any:
    functions = _FUNCTIONS.setdefault(V.graph, {})
    if name not in functions:
        functions[name] = _LayerFunction(name)
    function = functions[name]
    strides = [one.get_stride() for one in function.graph_inputs.values()]
    inputs = [
        ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(one), stride)
        for one, stride in zip((*reads, *state), strides, strict=True)
    ]
    return ir.TensorBox.create(_LayerCall(function, inputs, inputs[len(reads) :]))
