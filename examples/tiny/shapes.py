"""The geometries of the shipped models."""

from __future__ import annotations

from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from .tokenizer import END_OF_TURN, MAX_LENGTH


def target_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Returns the shape of the model and its fine-tune: 1.0 M parameters, 8 query heads on 2 KV heads."""
    return _llama(tokenizer, hidden_size=128, intermediate_size=384, layers=4, heads=8, kv_heads=2)


def draft_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Returns the shape of the draft: 0.2 M parameters, 4 query heads on 2 KV heads."""
    return _llama(tokenizer, hidden_size=64, intermediate_size=192, layers=2, heads=4, kv_heads=2)


def _llama(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_LENGTH,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_token_ids(tokenizer),
        dtype="float32",
    )


def stop_token_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns the ids that end a generation: the end of a text and the end of a turn."""
    return [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN)]


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Returns the sampling defaults that go with a model."""
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_token_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
    )
