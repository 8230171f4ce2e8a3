"""Cases of the rules on lengths, batches, targets, attention, buckets and blocks of KV."""

from tests.unit.compiler_svc.config.rules.rule_case import RuleCase

LENGTH_CASES = (
    RuleCase(
        "max_context_length",
        "at most seq_len",
        fails={"seq_len": 64, "max_context_length": 65},
        passes={"seq_len": 64, "max_context_length": 64},
    ),
    RuleCase(
        "max_length",
        "at least seq_len",
        fails={"seq_len": 64, "max_length": 63},
        passes={"seq_len": 64, "max_length": 64},
    ),
    RuleCase(
        "max_new_tokens",
        "at most seq_len",
        fails={"seq_len": 64, "max_new_tokens": 65},
        passes={"seq_len": 64, "max_new_tokens": 64},
    ),
    RuleCase(
        "n_positions",
        "at most max_length",
        fails={"seq_len": 64, "n_positions": 65},
        passes={"seq_len": 64, "n_positions": 65, "max_length": 65},
    ),
    RuleCase(
        "n_active_tokens",
        "at most seq_len",
        fails={"seq_len": 64, "n_active_tokens": 65},
        passes={"seq_len": 64, "n_active_tokens": 16, "n_positions": 32},
    ),
)

BATCHING_CASES = (
    RuleCase(
        "ctx_batch_size",
        "at most max_batch_size",
        fails={"batch_size": 4, "ctx_batch_size": 5},
        passes={"batch_size": 4, "ctx_batch_size": 1},
    ),
    RuleCase(
        "tkg_batch_size",
        "at most max_batch_size",
        fails={"max_batch_size": 2, "tkg_batch_size": 4},
        passes={"max_batch_size": 4, "tkg_batch_size": 2},
    ),
)

TARGET_CASES = (
    RuleCase(
        "tp_degree",
        "1, 2, 8, 16 or 32: the degrees of trn1",
        fails={"tp_degree": 4},
        passes={"tp_degree": 16},
        target="trn1",
    ),
    RuleCase(
        "tp_degree",
        "1, 2, 4, 8 or 24: the degrees of inf2",
        fails={"tp_degree": 32},
        passes={"tp_degree": 24},
        target="inf2",
    ),
    RuleCase(
        "tp_degree",
        "1, 2, 4, 8, 16, 32 or 64: the degrees of trn2",
        fails={"tp_degree": 24},
        passes={"tp_degree": 64},
    ),
    RuleCase(
        "tp_degree",
        "1, 2, 4, 8, 16, 32 or 64: the degrees of trn3, which are those of trn2 because no document lists them",
        fails={"tp_degree": 3},
        passes={"tp_degree": 8},
        target="trn3",
    ),
    *(
        RuleCase(
            "on_device_sampling_config.global_topk",
            f"from 1 to 1024 where tokens are sampled: the compiler for {target} has no sort",
            fails={"on_device_sampling_config": {"dynamic": True, "global_topk": global_topk}},
            passes={"on_device_sampling_config": {"dynamic": is_dynamic, "global_topk": passing}},
            target=target,
        )
        for target, global_topk, is_dynamic, passing in (
            ("trn2", 1025, True, 1024),
            ("trn3", 0, False, 0),
        )
    ),
)

ATTENTION_CASES = (
    RuleCase(
        "attention_dtype",
        "torch_dtype",
        fails={"torch_dtype": "bfloat16", "attention_dtype": "float32"},
        passes={"torch_dtype": "bfloat16", "attention_dtype": "float32", "cast_type": "as-declared"},
    ),
    RuleCase(
        "sequence_parallel_enabled",
        "false, unless max_context_length",
        fails={"seq_len": 100, "tp_degree": 8, "sequence_parallel_enabled": True},
        passes={"seq_len": 104, "tp_degree": 8, "sequence_parallel_enabled": True},
    ),
)

BUCKETS = {"seq_len": 256, "enable_bucketing": True}

BUCKET_CASES = (
    RuleCase(
        "context_encoding_buckets",
        "a list whose last bucket is at most max_context_length",
        fails=BUCKETS | {"max_context_length": 128, "context_encoding_buckets": [64, 256]},
        passes=BUCKETS | {"max_context_length": 128, "context_encoding_buckets": [64, 128]},
    ),
    RuleCase(
        "token_generation_buckets",
        "a list whose last bucket is at most max_length",
        fails=BUCKETS | {"token_generation_buckets": [128, 512]},
        passes=BUCKETS | {"token_generation_buckets": [128, 512], "max_length": 512},
    ),
    RuleCase(
        "context_encoding_buckets",
        "a list whose last bucket is at most n_active_tokens",
        fails=BUCKETS | {"n_active_tokens": 64, "context_encoding_buckets": [64, 65]},
        passes=BUCKETS | {"n_active_tokens": 64, "context_encoding_buckets": [32, 64]},
    ),
    RuleCase(
        "token_generation_buckets",
        "a list whose last bucket is at most n_positions",
        fails=BUCKETS | {"n_positions": 128, "token_generation_buckets": [64, 256]},
        passes=BUCKETS | {"n_positions": 128, "token_generation_buckets": [64, 128]},
    ),
    RuleCase(
        "prefix_buckets",
        "a list whose last bucket is at most max_context_length",
        fails=BUCKETS | {"prefix_buckets": [512]},
        passes=BUCKETS | {"prefix_buckets": [256]},
    ),
    RuleCase(
        "token_generation_batches",
        "a list whose last batch size is at most tkg_batch_size",
        fails={"batch_size": 4, "token_generation_batches": [2, 8]},
        passes={"batch_size": 4, "token_generation_batches": [2, 4]},
    ),
    RuleCase(
        "token_generation_batches",
        "none, because speculation_length",
        fails={"token_generation_batches": [1], "speculation_length": 4},
        passes={"token_generation_batches": [1]},
    ),
    RuleCase(
        "token_generation_batches",
        "none, because is_medusa",
        fails={
            "token_generation_batches": [1],
            "is_medusa": True,
            "num_medusa_heads": 1,
            "medusa_speculation_length": 2,
            "medusa_tree": [[0]],
        },
        passes={"token_generation_batches": [1]},
    ),
    RuleCase(
        "token_generation_batches",
        "none, because is_block_kv_layout",
        fails={"token_generation_batches": [1], "is_block_kv_layout": True},
        passes={"is_block_kv_layout": True},
    ),
)

BLOCKS = {"seq_len": 1024, "is_block_kv_layout": True, "pa_block_size": 32}

BLOCK_KV_CASES = (
    RuleCase(
        "is_prefix_caching",
        "false, unless is_block_kv_layout is true",
        fails={"is_prefix_caching": True},
        passes={"is_prefix_caching": True, "is_block_kv_layout": True},
    ),
    RuleCase(
        "pa_num_blocks",
        "at least max_batch_size * max_length / pa_block_size",
        fails=BLOCKS | {"batch_size": 2, "pa_num_blocks": 63},
        passes=BLOCKS | {"batch_size": 2, "pa_num_blocks": 64},
    ),
    RuleCase(
        "pa_num_blocks",
        "at least max_length / pa_block_size",
        fails=BLOCKS | {"batch_size": 2, "pa_num_blocks": 31},
        passes=BLOCKS | {"batch_size": 2, "pa_num_blocks": 32},
        target="cpu",
    ),
    RuleCase(
        "pa_num_blocks",
        "less than 2147483648 / pa_block_size",
        fails=BLOCKS | {"pa_num_blocks": 2**26},
        passes=BLOCKS | {"pa_num_blocks": 2**26 - 1},
        target="cpu",
    ),
    RuleCase(
        "is_block_kv_layout",
        "false beside padding_side left",
        fails=BLOCKS | {"pa_num_blocks": 32, "padding_side": "left"},
        passes=BLOCKS | {"pa_num_blocks": 32},
        target="cpu",
    ),
    RuleCase(
        "is_prefix_caching",
        "false beside padding_side left",
        fails=BLOCKS | {"pa_num_blocks": 32, "is_prefix_caching": True, "padding_side": "left"},
        passes=BLOCKS | {"pa_num_blocks": 32, "is_prefix_caching": True},
        also={"neuron_config.is_block_kv_layout"},
        target="cpu",
    ),
    RuleCase(
        "is_chunked_prefill",
        "false beside padding_side left",
        fails={"is_chunked_prefill": True, "padding_side": "left"},
        passes={"is_chunked_prefill": True},
        target="cpu",
    ),
    RuleCase(
        "pa_block_size",
        "a divisor of all token_generation_buckets and prefix_buckets",
        fails=BLOCKS | {"pa_num_blocks": 64, "pa_block_size": 48},
        passes=BLOCKS | {"pa_num_blocks": 64, "pa_block_size": 64},
    ),
)

CASES = (
    *LENGTH_CASES,
    *BATCHING_CASES,
    *TARGET_CASES,
    *ATTENTION_CASES,
    *BUCKET_CASES,
    *BLOCK_KV_CASES,
)
