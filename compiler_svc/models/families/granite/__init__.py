"""Granite 3, the dense models: embeddings, scores, residuals and logits are multiplied by attributes."""
