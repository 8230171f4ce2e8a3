"""A double of torch-neuronx: only that it is there."""

__version__ = "2.9.0.2.15.32035"
