"""The executable ABI as data: names, order, types and meaning of inputs, outputs and state.

All code that needs such a fact reads it here: tracing, executors, ranks, the golden check, the engine's step builder,
the fakes and contract suites of tests. A new input is one row of `inputs.INPUTS`, beside the code that consumes it.
Must not know torch, grpc or the manifest.

All submodels are one function of R rows of T tokens each. Row r computes `num_tokens[r]` valid tokens (all T if the
executable lacks that input). They are the first of the row or, in an executable with the flag `left_padded`, the last.
Padding never writes the KV cache. A row without a request is idle: each of its inputs has its idle value.
Any row may read and write any slot of the KV cache, or any blocks.
"""
