"""An interpreter of lowered, thread-bound TensorIR: what a GPU would compute, and what is wrong with a kernel.

>>> from tvm_ext.verify import simt
>>> kernels = simt.lower(func, "nvidia-a100")  # doctest: +SKIP
>>> result = simt.run(kernels, {"A": a, "B": b}, device="nvidia-a100")  # doctest: +SKIP
>>> result.findings, result.counters.bank_conflicts, result.outputs["C"]  # doctest: +SKIP
"""

from tvm_ext.analysis.launches import DeviceKernel, GlobalTensor, lower, own_name
from tvm_ext.ir.launch_writes import written_tensors

from .counters import AccessCount, Counters
from .findings import Finding
from .interpreter import SimtRun, run
from .turns import Concurrency

__all__ = [
    "AccessCount",
    "Concurrency",
    "Counters",
    "DeviceKernel",
    "Finding",
    "GlobalTensor",
    "SimtRun",
    "lower",
    "own_name",
    "run",
    "written_tensors",
]
