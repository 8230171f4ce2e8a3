"""StarCoder2: layer normalization, an MLP without a gate, biases, windows."""
