"""Reads and writes NxD Inference's `neuron_config.json`, the file of its `InferenceConfig.save`.

Knows how the file's form differs from a document's. Must not know attributes one by one: those have their tables.
"""

from compiler_svc.config.interchange.reading import adapt_document
from compiler_svc.config.interchange.writing import to_neuron_config_json

__all__ = ["adapt_document", "to_neuron_config_json"]
