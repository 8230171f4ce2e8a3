"""The executable ABI as data: names, order, types and meaning of inputs, outputs and state.

    submodels   how many rows and tokens a step of each submodel has, and what its buckets count
    inputs      name, dtype, dimensions, idle value and accepted values of each input, in calling order
    outputs     the same for what an executable returns, and how tokens are read from it
    state       the KV cache: its tensors, their axes and shapes, and who holds which entries
    digest      one digest over everything that a weight set must fit

All code that needs such a fact reads it here: tracing, executors, ranks, the golden check, the engine's step builder,
the fakes and contract suites of tests. A new input is one row of `inputs.INPUTS`, beside the code that consumes it.
Must not know torch, grpc or the manifest.

All submodels are one function of R rows of T tokens each. Row r computes `num_tokens[r]` valid tokens (all T if the
executable lacks that input). They are the first of the row or, in an executable with the flag `left_padded`, the last.
Padding never writes the KV cache. A row without a request is idle: each of its inputs has its idle value.
Any row may read and write any slot of the KV cache, or any blocks.
"""
