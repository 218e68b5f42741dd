"""Under which key a store keeps how long rTasks of an rKernel take."""

from __future__ import annotations

import hashlib

from tvm_ext._environment import SUPPORTED_VERSIONS, installed_version
from tvm_ext._tvm import PrimFunc, save_json
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.measurement import MeasuredWorkload

from .tile_workload import instructions_of

KIND = "rtask"
"""`MeasuredWorkload.kind` of an rKernel, whose configurations are how many iterations one rTask has."""


def rtask_workload(kernel: PrimFunc, device: DeviceSpec) -> MeasuredWorkload:
    """The key of ``kernel``, whatever it is called, on ``device``, all of whose cores run rTasks meanwhile."""
    code = save_json(kernel.without_attr("global_symbol"))
    return MeasuredWorkload(
        kind=KIND,
        structure=hashlib.sha256(code.encode()).hexdigest(),
        layout="",
        dtype="",
        device=device.description,
        instructions=instructions_of(device),
        threads=device.unit_count,
        versions=(("apache-tvm", installed_version("apache-tvm") or SUPPORTED_VERSIONS["apache-tvm"]),),
    )
