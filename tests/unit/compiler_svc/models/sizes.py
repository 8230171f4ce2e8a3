"""A small model in the attributes of `config.json`, for tests that change some of them."""

from typing import Any, Final

#: Under the names of most families: eight layers, and as many heads of eight dimensions.
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "ffn_dim": 100,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
