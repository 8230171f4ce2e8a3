"""GPT-NeoX and Pythia: parallel residual, heads rotated in part, one matrix for queries, keys and values."""
