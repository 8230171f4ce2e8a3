"""OnDeviceSamplingConfig."""

from __future__ import annotations

from typing import Final

from compiler_svc.config.attribute import Attribute, ConfigTable
from compiler_svc.config.domains import Flag, Integer, Number
from compiler_svc.config.tables.attention import NO_KERNELS
from compiler_svc.config.tables.documents import FEATURE_SAMPLING, SAMPLING, UNDOCUMENTED
from compiler_svc.config.tables.undocumented import only_default

ON_DEVICE_SAMPLING_CONFIG: Final = ConfigTable(
    "OnDeviceSamplingConfig",
    (
        Attribute(name="do_sample", domain=Flag(), default=False, section=SAMPLING),
        Attribute(name="top_k", domain=Integer(-1), default=1, section=SAMPLING),
        Attribute(name="top_p", domain=Number(0, 1, positive=True), default=1.0, section=FEATURE_SAMPLING),
        Attribute(name="temperature", domain=Number(0), default=1.0, section=FEATURE_SAMPLING),
        Attribute(name="dynamic", domain=Flag(), default=False, section=SAMPLING),
        Attribute(name="deterministic", domain=Flag(), default=False, section=SAMPLING),
        Attribute(name="global_topk", domain=Integer(0), default=256, section=SAMPLING),
    ),
    (
        Attribute(name="top_k_kernel_enabled", domain=Flag(), default=False, section=UNDOCUMENTED, cpu=NO_KERNELS),
        # NxD Inference writes this into its files.
        *only_default(on_device_sampling_config=True),
    ),
)
