"""BLOOM: ALiBi in place of positions, normalized embeddings, one matrix for queries, keys and values."""
