"""What a GGUF file says of a model: its `config.json`, and its tensors under the names that transformers gives them."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from bundle.abi.formats import WeightFormat
from bundle.manifest import DEFAULT_CHAT_TEMPLATE
from compiler_svc.models.registry import list_gguf_families
from compiler_svc.weights.errors import CheckpointInvalid
from compiler_svc.weights.gguf.header import BlockType, GgufHeader, StoredTensor

#: Inputs that share a factor and an offset in the types of four bits.
GROUP: Final = 32
_ARCHITECTURE: Final = "general.architecture"
_TABLE: Final = "token_embd.weight"
_FREQUENCIES: Final = "rope_freqs.weight"
_HEADS: Final = "attention.head_count"
_SPLITS: Final = "split.count"
_TEMPLATE: Final = "tokenizer.chat_template"
_TOKENS: Final = "tokenizer.ggml."
_BEGIN: Final = "bos_token_id"
_PAD: Final = "padding_token_id"
#: Keys of a tokenizer that name tokens with which a text ends.
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_LAYER: Final = re.compile(r"blk\.(?P<number>0|[1-9]\d*)\.(?P<path>\w+)\.(?P<kind>weight|bias)")

#: Attributes of a `config.json` by the keys behind the architecture's name.
_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    _HEADS: "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL_KEYS: Final = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_ROPE: Final = "rope.scaling."
#: Keys that tensors say, too, or that change nothing.
_UNREAD: Final = ("vocab_size", "attention.value_length", "rope.dimension_count", f"{_ROPE}finetuned")
#: Published models of type `llama3` have these, whatever their factor.
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_OUTSIDE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a model, and how its values come from what the file has.

    Attributes:
        name: transformers' name.
        heads: Heads whose rows the file has in another order; 0: no such rows.
        offset: What the file has added to the values.
    """

    name: str
    stored: StoredTensor
    file: Path
    heads: int
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, which is that of the values."""
        return self.stored.shape

    @property
    def type(self) -> BlockType:
        """How the file keeps its values."""
        return self.stored.type

    @property
    def kept_item(self) -> str | None:
        """The item of the rows of `FORMATS` that can be what this is; None if none can."""
        return "uint8" if self.type.is_four_bit else None

    @property
    def kept_group(self) -> int:
        """The groups whose scales it has; 0 if it has none."""
        return GROUP if self.type.is_four_bit else 0

    @property
    def activations(self) -> str:
        """How layers quantize what they multiply by it: not at all."""
        return ""

    def fits(self, row: WeightFormat) -> bool:
        """Whether a format can have its items and scales as they are."""
        return self.type.is_four_bit and row.group == GROUP


class GgufModel:
    """What the header of a file says of a model; raises CheckpointInvalid for what this compiler does not read."""

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self._file, self._metadata, self._stored = file, header.metadata, header.tensors
        if (parts := self._metadata.get(_SPLITS, 1)) not in (0, 1):
            self._refuse(_SPLITS, f"{parts} files", "one file: `gguf-split --merge` makes it of them")
        name = self._metadata.get(_ARCHITECTURE)
        families = list_gguf_families()
        if not isinstance(name, str) or name not in families:
            value = "missing" if name is None else repr(name)
            accepted = f"one of {', '.join(families)}; or the model's Hugging Face checkpoint"
            self._refuse(_ARCHITECTURE, value, accepted)
        architecture = families[name].gguf
        assert architecture is not None, "the families that files have"
        self._prefix, self._architecture, self._model_type = f"{name}.", architecture, families[name].model_type
        self.config = self._read_config()
        self.tensors = {tensor.name: tensor for tensor in self._list_tensors()}

    @property
    def chat_templates(self) -> dict[str, str]:
        """Jinja source of each chat template, by name."""
        return {
            key.removeprefix(_TEMPLATE).removeprefix(".") or DEFAULT_CHAT_TEMPLATE: source
            for key, source in self._metadata.items()
            if isinstance(source, str) and re.fullmatch(rf"{re.escape(_TEMPLATE)}(\.\w+)?", key)
        }

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a vocabulary."""
        return f"{_TOKENS}tokens" in self._metadata

    def _read_config(self) -> dict[str, Any]:
        keys, architecture = self._read_keys(), self._architecture
        config: dict[str, Any] = {
            attribute: self._check_number(f"{self._prefix}{key}", keys.pop(key))
            for key, attribute in (_KEYS | _OPTIONAL_KEYS | dict(architecture.keys)).items()
            if key in keys
        }
        lacking = [key for key, attribute in _KEYS.items() if attribute not in config]
        if lacking:
            self._refuse(f"{self._prefix}{lacking[0]}", "missing", "a number")
        if _TABLE not in self._stored or len(self._stored[_TABLE].shape) != 2:
            self._refuse(_TABLE, "missing", "a matrix of embeddings")
        config |= {
            "model_type": self._model_type,
            "vocab_size": self._stored[_TABLE].shape[0],
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": "blk.0.attn_q.bias" in self._stored,
        }
        heads, head_dim = config["num_attention_heads"], config.get("head_dim")
        if architecture.large_layers and isinstance(heads, int) and heads > 0 and head_dim:
            is_large = config["num_hidden_layers"] == architecture.large_layers
            config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_large else head_dim
        if scaling := self._read_rope_scaling(keys, config):
            config["rope_scaling"] = scaling
        self._check_rotated(keys, config)
        for key, value in keys.items():
            if value and key not in _UNREAD:
                self._refuse(f"{self._prefix}{key}", repr(value), "a file without it, or its Hugging Face checkpoint")
        return config | self._read_dtype() | self._read_token_ids()

    def _read_keys(self) -> dict[str, Any]:
        return {
            key.removeprefix(self._prefix): value
            for key, value in self._metadata.items()
            if key.startswith(self._prefix)
        }

    def _check_rotated(self, keys: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        if not all(type(one) is int and one > 0 for one in (heads, hidden)):
            return  # for the family to refuse
        head_dim = config.get("head_dim") or hidden // heads
        if (rotated := keys.get("rope.dimension_count", head_dim)) != head_dim:
            self._refuse(f"{self._prefix}rope.dimension_count", str(rotated), f"{head_dim}, the whole of a head")

    def _read_rope_scaling(self, keys: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
        given = {key.removeprefix(_ROPE): keys.pop(key) for key in list(keys) if key.startswith(_ROPE)}
        kind = given.pop("type", "none")
        given.pop("finetuned", None)
        if not isinstance(kind, str):
            self._refuse(f"{self._prefix}{_ROPE}type", repr(kind), "a name")
        if _FREQUENCIES in self._stored:
            if kind not in {"none", "llama3"}:
                self._refuse(_FREQUENCIES, f"beside {self._prefix}{_ROPE}type {kind!r}", "one of both")
            return self._read_frequencies(config)
        if kind == "none":
            return None
        names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
        if kind not in {"linear", "yarn"} or given.keys() - names.keys():
            value = f"{kind!r} with {', '.join(given) or 'nothing'}"
            accepted = f"none, linear or yarn, with {' and '.join(names)}"
            self._refuse(f"{self._prefix}{_ROPE}type", value, accepted)
        return {"rope_type": kind} | {
            names[name]: self._check_number(f"{self._prefix}{_ROPE}{name}", value) for name, value in given.items()
        }

    def _read_frequencies(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What divides frequencies, as parameters of the type `llama3` that give the same divisors."""
        stored = self._stored[_FREQUENCIES]
        if stored.type.name != "F32" or len(stored.shape) != 1:
            self._refuse(_FREQUENCIES, f"{stored.type.name} {list(stored.shape)}", "a vector in F32")
        with self._file.open("rb") as opened:
            opened.seek(stored.start_byte)
            divisors = struct.unpack(f"<{stored.shape[0]}f", opened.read(stored.size_bytes))
        theta = float(config.get("rope_theta", 10_000.0))
        if theta <= 0 or not all(0 < one < math.inf for one in divisors):
            self._refuse(_FREQUENCIES, f"a divisor or a base ({theta:g}) that is none", "finite numbers above 0")
        scaling = {"rope_type": "llama3", "factor": float(divisors[-1]), **_LLAMA3}
        expected = compute_divisors(theta, len(divisors), scaling)
        if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(divisors, expected, strict=True)):
            self._refuse(
                _FREQUENCIES, "other divisors than those of the type 'llama3'", "the model's Hugging Face checkpoint"
            )
        return scaling

    def _read_dtype(self) -> dict[str, str]:
        """The floats that the matrices are; nothing if some are quantized."""
        types = {tensor.type.dtype for tensor in self._stored.values() if len(tensor.shape) > 1}
        if "" in types:
            return {}
        return {"dtype": next(one for one in ("bfloat16", "float16", "float32") if one in types)}

    def _read_token_ids(self) -> dict[str, Any]:
        given = {name: self._metadata.get(f"{_TOKENS}{name}") for name in (_BEGIN, _PAD, *_ENDS)}
        for name, token in given.items():
            if token is not None and type(token) is not int:
                self._refuse(f"{_TOKENS}{name}", repr(token), "the number of a token")
        ends = list(dict.fromkeys(given[name] for name in _ENDS if given[name] is not None))
        # None, too: configurations have defaults of their own for what is not there.
        return {
            "bos_token_id": given["bos_token_id"],
            "eos_token_id": ends or None,
            "pad_token_id": given["padding_token_id"],
        }

    def _list_tensors(self) -> Iterator[GgufTensor]:
        names = _NAMES | dict(self._architecture.names)
        for stored in self._stored.values():
            if stored.name == _FREQUENCIES:
                continue
            path, _, kind = stored.name.rpartition(".")
            match = _LAYER.fullmatch(stored.name)
            name = _OUTSIDE.get(path)
            if match and match["path"] in names:
                path, kind = match["path"], match["kind"]
                name = f"model.layers.{match['number']}.{names[path]}"
            if name is None or kind not in {"weight", "bias"}:
                known = ", ".join((*_OUTSIDE, *(f"blk.N.{one}" for one in names)))
                self._refuse(stored.name, "a tensor that the architecture has not", f"one of {known}")
            if not stored.type.dtype and len(stored.shape) != 2:
                self._refuse(stored.name, f"{stored.type.name} {list(stored.shape)}", "blocks in matrices alone")
            yield GgufTensor(
                name=f"{name}.{kind}",
                stored=stored,
                file=self._file,
                heads=self._count_heads(path, stored),
                offset=self._architecture.norm_offset if "norm" in path else 0.0,
            )

    def _count_heads(self, path: str, stored: StoredTensor) -> int:
        if not self._architecture.turns_neighbours or path not in {"attn_q", "attn_k"}:
            return 0
        of_keys = self.config.get("num_key_value_heads", self.config["num_attention_heads"])
        heads = self.config["num_attention_heads"] if path == "attn_q" else of_keys
        if type(heads) is not int or heads < 1 or stored.shape[0] % (2 * heads):
            self._refuse(stored.name, f"shape {list(stored.shape)}", f"heads of even size, {heads} of them")
        return heads

    def _check_number(self, key: str, value: object) -> int | float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self._refuse(key, "a long array" if value is None else repr(value), "a finite number")
        return value

    def _refuse(self, subject: str, value: str, accepted: str) -> NoReturn:
        raise CheckpointInvalid(self._file, subject, value, accepted)


def compute_divisors(theta: float, count: int, scaling: Mapping[str, Any]) -> Iterator[float]:
    """What the rotary embedding `llama3` divides each frequency by."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    for number in range(count):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (number / count))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - share) / factor + share)
