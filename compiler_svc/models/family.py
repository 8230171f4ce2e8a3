"""What a model family tells the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler_svc.models.attribute_names import COMMON_NAMES, AttributeNames
from compiler_svc.models.description import ModelDescription
from compiler_svc.models.gguf import GgufArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedText:
    """The text model inside of another. `defaults` are transformers', of required attributes that files leave out."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models. It needs no torch: what does is named, and resolved by the process that builds.

    Attributes:
        architectures: Hugging Face's names, as `config.json` has them under `architectures`.
        model_type: Hugging Face's name of the type, which decides where `architectures` does not; empty: it never does.
        attributes: Names of the attributes of `config.json` that count; others are ignored.
        describe: Describes the model of a `config.json` that names one of the architectures, with a configuration's
            model attributes in it. Raises ModelConfigInvalid, which names every attribute that is missing or
            impossible, and ModelNotServed for what the family does not build, such as a kind of rope.
        reference: `module:class` of transformers' model, which builds compare their executables with.
        model: `module:function` that builds the module of one rank, called as
            `build(description, dtype=torch.dtype, ranks=Ranks)`.
        nested: Where the attributes stand if its models have another family's inside; None: at the top level.
        tokenizer_classes: Names of the classes of transformers that read its tokenizers, if transformers picks none
            or another by the type of the model.
        gguf: How GGUF files have its models; None: such files are refused.
    """

    architectures: tuple[str, ...]
    attributes: frozenset[str]
    describe: Callable[[Mapping[str, Any]], ModelDescription]
    reference: str
    model_type: str = ""
    model: str = "compiler_svc.models.layers.decoder:CausalLm"
    names: AttributeNames = COMMON_NAMES
    nested: NestedText | None = None
    tokenizer_classes: tuple[str, ...] = ()
    gguf: GgufArchitecture | None = None
