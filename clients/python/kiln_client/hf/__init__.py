"""Hugging Face's `generate` for a deployment: `KilnForCausalLM` stands where a model of transformers does.

Needs the extra `kiln-client[hf]`, torch and transformers, which nothing else of the client imports.
"""

from kiln_client.hf.model import KilnConfig, KilnForCausalLM

__all__ = ["KilnConfig", "KilnForCausalLM"]
