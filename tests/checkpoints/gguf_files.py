"""GGUF files as llama.cpp's converter writes them, by `gguf`, of checkpoints that transformers has saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from torch import Tensor

#: Names of architectures in files, where transformers has others.
_NAMES: Final = {"gemma3_text": "gemma3"}
_SPECIAL: Final = {"bos_token_id": "bos_token", "eos_token_id": "eos_token", "padding_token_id": "pad_token"}


def write_gguf(
    model: Path,
    path: Path,
    kind: Kind,
    *,
    kinds: Mapping[str, Kind] | None = None,
    fields: Mapping[str, Any] | None = None,
    divisors: list[float] | None = None,
    vocab: str = "gpt2",
    pieces: SentencePieceProcessor | None = None,
) -> Path:
    """Converts a checkpoint in one safetensors file, its matrices to a type; vectors stay in float32.

    `kinds` are other types of matrices, by the file's names; `fields` more numbers behind the architecture's name;
    `divisors` those of the rotary embedding; `vocab` the kind of its vocabulary, which is that of the checkpoint, or
    `pieces`.
    """
    config = json.loads((model / "config.json").read_text())
    name = _NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name)
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    for field, value in (fields or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{name}.{field}", value)
    if pieces is not None:
        _add_pieces(writer, pieces)
    elif (model / "tokenizer.json").exists():
        _add_tokenizer(writer, model, vocab)
    architecture = next(one for one, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for own, tensor in load_file(model / "model.safetensors").items():
        renamed = names.get_name(own, (".weight", ".bias"))
        assert renamed, own
        values = _convert(tensor.float(), own, name, heads, kv_heads)
        _add_tensor(writer, renamed, values, (kinds or {}).get(renamed, kind))
    if divisors:
        _add_tensor(writer, "rope_freqs.weight", torch.tensor(divisors), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _convert(tensor: Tensor, name: str, architecture: str, heads: int, kv_heads: int) -> Tensor:
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        # llama.cpp rotates neighbours, transformers halves of a head.
        halves = tensor.view(heads if "q_proj" in name else kv_heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor + 1 if "gemma" in architecture and "norm" in name else tensor


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Kind) -> None:
    if tensor.dim() < 2:
        kind = Kind.F32
    writer.add_tensor(name, gguf.quants.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)


def _add_pieces(writer: gguf.GGUFWriter, pieces: SentencePieceProcessor) -> None:
    ids = range(pieces.vocab_size())
    kinds = {"IsUnknown": gguf.TokenType.UNKNOWN, "IsControl": gguf.TokenType.CONTROL, "IsByte": gguf.TokenType.BYTE}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.IdToPiece(one) for one in ids])
    writer.add_token_scores([pieces.GetScore(one) for one in ids])
    writer.add_token_types(
        [
            next((kind for test, kind in kinds.items() if getattr(pieces, test)(one)), gguf.TokenType.NORMAL)
            for one in ids
        ]
    )
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path, vocab: str) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = {one["content"]: one for one in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | {token: one["id"] for token, one in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model(vocab)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if one in added else gguf.TokenType.NORMAL for one in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    config = json.loads((model / "tokenizer_config.json").read_text())
    for key, token in _SPECIAL.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", ids[config[token]])
    writer.add_eot_token_id(ids["<|eot|>"])
    writer.add_add_bos_token(True)
    writer.add_chat_template((model / "chat_template.jinja").read_text())
