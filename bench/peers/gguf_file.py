"""A Llama checkpoint as a GGUF file of its own dtype, without a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(model: Path, path: Path) -> None:
    """Converts a checkpoint of one safetensors file, in float32 or bfloat16. Vectors are float32 in either."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    is_float = config["dtype"] == "float32"
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if is_float else gguf.LlamaFileType.MOSTLY_BF16)
    matrix_type = gguf.GGMLQuantizationType.F32 if is_float else gguf.GGMLQuantizationType.BF16
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = _reorder(name, file.get_tensor(name).to(torch.float32).numpy(), heads, kv_heads)
            kind = matrix_type if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(_rename(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(adapter: Path, model: Path, path: Path) -> None:
    """Converts an adapter of such a checkpoint, in PEFT's format and float32."""
    config, of_model = (json.loads(one.read_text()) for one in (adapter / "adapter_config.json", model / "config.json"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, config["lora_alpha"])
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            module, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
            tensor = file.get_tensor(name).numpy()
            if kind == "lora_B":
                heads, kv_heads = of_model["num_attention_heads"], of_model["num_key_value_heads"]
                tensor = _reorder(name, tensor, heads, kv_heads)
            writer.add_tensor(f"{_rename(module)}.{kind.lower()}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rename(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.weight"
    return f"{_NAMES[name]}.weight"


def _reorder(name: str, tensor: np.ndarray[Any, Any], heads: int, kv_heads: int) -> np.ndarray[Any, Any]:
    # llama.cpp rotates neighbours, transformers halves of a head.
    count = heads if "q_proj" in name else kv_heads if "k_proj" in name else None
    if count is None:
        return tensor
    halves = tensor.reshape(count, 2, -1, tensor.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
