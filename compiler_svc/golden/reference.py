"""A checkpoint's model in transformers, which executables are compared with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bundle.abi.formats import ACTIVATION_FORMATS, ActivationFormat
from bundle.host.shortage import find_shortage
from compiler_svc.adapters.files import KINDS, Adapter
from compiler_svc.errors import shorten
from compiler_svc.golden.errors import ReferenceFailed
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.nested_text import nest_config
from compiler_svc.models.registry import find_family
from compiler_svc.models.sources import Items, Joined, Sliced, Transposed, list_tensors
from compiler_svc.models.specs import LayerSpec
from compiler_svc.models.transforms import UNCHANGED, ModelChanges, Quantization, quantize
from compiler_svc.sharding.plan import PlannedTensor, plan_weights
from compiler_svc.sharding.values import SourceReader
from compiler_svc.weights.checkpoint import Checkpoint
from compiler_svc.weights.tensors import TensorReader
from execution.attention.reference import keep
from execution.dtypes import TORCH_DTYPES
from execution.quantized_linear import dequantize, quantize_rows

REFERENCE_NAME: Final = f"transformers {transformers.__version__}"

#: Rows from which a product takes longer than copies of its matrices in float32. On AVX2, 504 rows in bfloat16 took
#: five times as long without them.
MIN_ROWS: Final = 32

#: What multiplies matrices, each with the place of the rows among its arguments.
_PRODUCTS: Final[Mapping[Any, int]] = {functional.linear: 0, torch.matmul: 0, torch.Tensor.matmul: 0, torch.addmm: 1}


class Reading(NamedTuple):
    """What a model makes of each token of a prompt: logits f32 [tokens, vocab_size], and what its head takes, f32
    [tokens, hidden_size].
    """

    logits: Tensor
    hidden: Tensor


class Reference:
    """A checkpoint's model in transformers, in the dtype of the executables."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        changes: ModelChanges = UNCHANGED,
    ) -> None:
        """Loads the whole model into memory; of matrices that are quantized, or become so, what that leaves of them.

        If `changes` say how keys and values are kept, the model attends to what that leaves; if they quantize what
        layers multiply, these layers multiply what that leaves.
        """
        quantization = changes.quantization
        self._kept = None if changes.kept is None else TORCH_DTYPES[changes.kept.dtype]
        self._scales = [] if self._kept is None else _read_scales(checkpoint, changes)
        transformers.utils.logging.disable_progress_bar()
        # Its report of tensors that it does not take: the plan has said so.
        transformers.utils.logging.set_verbosity_error()
        family = find_family(checkpoint.config)
        model = resolve_name(family.reference)
        self._config_class = model.config_class
        self._ignored = {name: one for name, one in checkpoint.config.items() if name not in family.attributes}
        #: Names of the attributes that transformers has read.
        self._read: set[str] = set()
        self._slow = list_slow_dtypes()
        attributes = deepcopy(nest_config(checkpoint.whole_config, checkpoint.config))
        for one in (attributes, attributes.get("text_config")):
            if one is not None:
                one.pop("quantization_config", None)
        with self._naming_failures(None):
            config = model.config_class.from_dict(attributes)
        source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path}
        if quantization is not None or checkpoint.packed or checkpoint.is_gguf:
            source = {"pretrained_model_name_or_path": None, "state_dict": read_dequantized(checkpoint, quantization)}
        if quantization is not None:
            # transformers would tie a quantized head again to the table that is not quantized.
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        with self._naming_failures(config):
            self._model = model.from_pretrained(
                **source, config=config, dtype=dtype, attn_implementation="eager", local_files_only=True
            ).eval()
        if quantization is not None and quantization.activations:
            self._quantize_activations(quantize(checkpoint.description, quantization))

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], num_prompt_tokens: int) -> Iterator[Tensor]:
        """Feeds a prompt and then the later tokens one by one, as generation does; yields logits after the prompt and
        after each later token, f32 [vocab_size].
        """
        # Some rotary embeddings remember the longest sequence that they have seen, so each sequence gets a new one.
        decoder = self._decoder
        if hasattr(decoder, "rotary_emb"):
            with self._naming_failures(self._model.config):
                decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
        steps = [list(tokens[:num_prompt_tokens]), *([token] for token in tokens[num_prompt_tokens:])]
        with self._naming_failures(self._model.config):
            cache = None if self._kept is None else _KeptCache(self._kept, self._scales, self._model.config)
        for step in steps:
            with self._naming_failures(self._model.config), WideProducts(self._slow):
                output = self._model(torch.tensor([step]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            yield output.logits[0, -1].float()

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Reading:
        """Feeds a prompt, and says what the model makes of each of its tokens."""
        taken: list[Tensor] = []
        hook = self._model.get_output_embeddings().register_forward_pre_hook(lambda _, args: taken.append(args[0]))
        try:
            # Behind `run`, which has given the rotary embedding the sequence.
            with self._naming_failures(self._model.config), WideProducts(self._slow):
                cache = None if self._kept is None else _KeptCache(self._kept, self._scales, self._model.config)
                output = self._model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=cache is not None)
        finally:
            hook.remove()
        return Reading(output.logits[0].float(), taken[0][0].float())

    @contextmanager
    def adapted(self, adapter: Adapter, description: ModelDescription) -> Iterator[None]:
        """Adds B(A x) of an adapter to its modules within the block, in float32."""
        with ExitStack() as hooks:
            for one in adapter.changes:
                a, b = (one.tensors[kind].float() for kind in KINDS)
                module = self._find_module(description, one.module)
                hooks.callback(module.register_forward_hook(partial(_add, a, b)).remove)
            yield

    def _find_module(self, description: ModelDescription, name: str) -> nn.Module:
        """The module of a linear layer among the decoder's, by the checkpoint's name of it."""
        layers = f"{description.storage.prefix}{description.storage.layers}"
        # transformers may have its list of layers at another place than checkpoints.
        tail = f".{layers.rpartition('.')[2]}{name.removeprefix(layers)}"
        modules: Iterator[tuple[str, nn.Module]] = self._decoder.named_modules()
        module = next((module for path, module in modules if f".{path}".endswith(tail)), None)
        assert module is not None, f"{tail} is no module of {REFERENCE_NAME}"
        return module

    @property
    def _decoder(self) -> Any:
        """The text model without its head."""
        return getattr(self._model.base_model, "language_model", self._model.base_model)

    def _quantize_activations(self, description: ModelDescription) -> None:
        """Lets the modules of quantized layers multiply what quantization leaves."""
        outputs: dict[nn.Module, list[slice]] = {}
        for linear in (one for one in description.linears() if one.activations):
            for part in linear.list_stored("weight"):
                if linear is description.head:
                    module = self._model.get_output_embeddings()
                else:
                    (stored,) = list_tensors(part)
                    name = description.storage.find_name(stored).rpartition(".")[0]
                    module = self._find_module(description, name)
                outputs.setdefault(module, []).append(slice(part.start, part.start + part.length))
        kind = ACTIVATION_FORMATS[next(one.activations for one in description.linears() if one.activations)]
        for module, slices in outputs.items():
            module.forward = partial(_multiply_quantized, module.forward, slices, kind)

    @contextmanager
    def _naming_failures(self, config: Any) -> Iterator[None]:
        """Names what transformers raises in the block, with the attributes that the family ignores and transformers has
        read; notes those that it reads of a configuration, if there is one yet.
        """
        configs = [] if config is None else list({id(one): one for one in (config, config.get_text_config())}.values())
        kinds: list[type] = [type(one) for one in configs]
        for one, kind in zip(configs, kinds, strict=True):
            one.__class__ = _note_reads(kind, self._read)
        try:
            yield
        except Exception as error:
            if find_shortage(error) is not None:
                raise
            raise ReferenceFailed(REFERENCE_NAME, shorten(error), self._list_ignored()) from error
        finally:
            for one, kind in zip(configs, kinds, strict=True):
                one.__class__ = kind

    def _list_ignored(self) -> list[str]:
        """Names of the attributes that transformers has read, the family ignores, and that say something."""
        default = None
        with suppress(Exception):
            default = self._config_class().get_text_config()
        return sorted(
            name
            for name, value in self._ignored.items()
            if name in self._read and value != getattr(default, name, None)
        )


class _KeptCache(transformers.DynamicCache):  # type: ignore[misc]
    """A cache with what a dtype keeps of keys and values, by layer divided by scales of keys and of values."""

    def __init__(self, dtype: torch.dtype, scales: Sequence[tuple[Tensor, Tensor]], config: Any) -> None:
        super().__init__(config=config)
        self._dtype = dtype
        self._own_scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds a step's keys and values to a layer's, and returns all of them."""
        scaled = zip((key_states, value_states), self._own_scales[layer_idx], strict=True)
        # As executables do, which divide in float32 and round to the dtype of the computation before they keep.
        kept = (
            (keep((tensor / scale).to(tensor.dtype), self._dtype).float() * scale).to(tensor.dtype)
            for tensor, scale in scaled
        )
        updated: tuple[Tensor, Tensor] = super().update(*kept, layer_idx, *rest, **options)
        return updated


def list_slow_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that torch's library of products does not have for this host's processor."""
    has = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001 - no other function says so
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # noqa: SLF001
    }
    return frozenset(dtype for dtype, is_there in has.items() if not is_there)


class WideProducts(TorchFunctionMode):
    """Multiplies many rows by float32 copies of the matrices, and rounds the sums, as torch does item by item."""

    def __init__(self, dtypes: Collection[torch.dtype]) -> None:
        """Leaves products in other dtypes as they are."""
        super().__init__()
        self._dtypes = dtypes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each of its functions while the mode is on."""
        place = _PRODUCTS.get(func)
        if place is None or kwargs or args[place].dtype not in self._dtypes:
            return func(*args, **(kwargs or {}))
        rows = args[place]
        if rows.shape[:-1].numel() < MIN_ROWS:
            return func(*args)
        return func(*(None if one is None else one.float() for one in args)).to(rows.dtype)


def _multiply_quantized(
    multiply: Callable[[Tensor], Tensor], outputs: Sequence[slice], kind: ActivationFormat, hidden: Tensor
) -> Tensor:
    """Computes a linear module, some of whose outputs are of what quantization leaves of its input."""
    items, scales = quantize_rows(hidden, hidden.abs().amax(-1, keepdim=True), kind)
    computed = multiply((items.to(torch.float32) * scales).to(hidden.dtype))
    if sum(one.stop - one.start for one in outputs) == computed.shape[-1]:
        return computed
    whole = multiply(hidden)
    for one in outputs:
        whole[..., one] = computed[..., one]
    return whole


def _add(a: Tensor, b: Tensor, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """What a module with an adapter returns."""
    return output + (args[0].float() @ a.t() @ b.t()).to(output.dtype)


def _note_reads(kind: Any, read: set[str]) -> type:
    """A class like another one, whose objects note the names of the attributes that are read of them."""

    def note(own: object, name: str) -> Any:
        read.add(name)
        return kind.__getattribute__(own, name)

    return type(kind.__name__, (kind,), {"__getattribute__": note, "__module__": kind.__module__})


def read_dequantized(checkpoint: Checkpoint, quantization: Quantization | None) -> dict[str, Tensor]:
    """Reads a checkpoint's tensors; quantized matrices are float32, and what quantization leaves of them.

    With `quantization`, a head that is tied in the checkpoint becomes a tensor of its own.
    """
    with TensorReader(checkpoint) as reader:
        state = {name: reader.read(name) for name in checkpoint.tensors}
        if quantization is None:
            return state
        description = quantize(checkpoint.description, quantization)
        plan = plan_weights(description, checkpoint, dtype="float32", cast_type="config", tp_degree=1)
        planned = {one.name: one for one in plan.tensors}
        opened = SourceReader(reader)
        if description.is_tied:
            head, table = (
                description.storage.find_name(f"{one.name}.weight") for one in (description.head, description.embedding)
            )
            (stored,) = list_tensors(planned[f"{description.embedding.name}.weight"].spec.source)
            state[table] = state[head] = state[stored]
        widened: set[str] = set()
        for linear in (one for one in description.linears() if one.format):
            items = planned[f"{linear.name}.weight"].spec.source
            assert isinstance(items, Items)
            rows = dequantize(*(_read(opened, planned[f"{linear.name}.{kind}"]) for kind in ("weight", "scale")))
            is_tied = description.is_tied and linear is description.head
            for part in items.matrix.parts if isinstance(items.matrix, Joined) else (items.matrix,):
                assert isinstance(part, Sliced)
                name = head if is_tied else list_tensors(part)[0]
                if name not in widened:
                    state[name] = state[name].to(torch.float32, copy=True)
                    widened.add(name)
                target = state[name].t() if isinstance(part.whole, Transposed) else state[name]
                target[part.start : part.start + part.length], rows = rows[: part.length], rows[part.length :]
    return state


def _read_scales(checkpoint: Checkpoint, changes: ModelChanges) -> list[tuple[Tensor, Tensor]]:
    """Reads what each layer's keys and values are divided by before they are kept, float32; 1: by nothing."""
    description = ModelChanges(kept=changes.kept).apply(checkpoint.description)
    plan = plan_weights(description, checkpoint, dtype="float32", cast_type="config", tp_degree=1)
    planned = {one.name: one for one in plan.tensors}
    with TensorReader(checkpoint) as reader:
        opened = SourceReader(reader)

        def read(layer: LayerSpec, name: str) -> Tensor:
            path = f"{layer.attention.output.name.rpartition('.')[0]}.{name}"
            return _read(opened, planned[path]) if path in planned else torch.ones(1)

        return [(read(layer, "k_scale"), read(layer, "v_scale")) for layer in description.layers]


def _read(opened: SourceReader, planned: PlannedTensor) -> Tensor:
    values = torch.empty(planned.rank_shape, dtype=TORCH_DTYPES[planned.dtype])
    opened.open(planned.spec.source, 0)(tuple((0, length) for length in values.shape), values)
    return values
