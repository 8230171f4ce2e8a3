"""Gemma 2: four norms a layer, every other layer slides, attention's scores and logits are capped."""
