"""Gemma 3, its text models: four norms a layer, heads are normalized, layers that slide have a rope of their own."""
