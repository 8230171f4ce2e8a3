"""A double of torch-xla: what it has for a device is torch's CPU.

It makes no graphs, but for those of tensors that come from placeholders: their operations are recorded as they run.
"""

import torch

from torch_xla import recorder as _XLAC  # noqa: F401, N812 - upstream's name

__version__ = "2.9.0"


def device() -> torch.device:
    return torch.device("cpu")


def sync() -> None:
    pass
