from tests.neuron.host import faults, neuron_process, neuron_toy, nrt_library
from tests.ranks.toy_bundles import toy, toy_directory

__all__ = ["faults", "neuron_process", "neuron_toy", "nrt_library", "toy", "toy_directory"]
