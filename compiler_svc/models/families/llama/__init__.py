"""Llama 2, 3 and 3.x."""
