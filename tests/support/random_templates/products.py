"""Problems, devices and epilogues that the tests of templates share."""

from __future__ import annotations

import dataclasses
import re

from tvm_ext.byoc_cutlass.elements import MULTIPLIERS
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import GemmConfig, packed_problem
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.rows.cuda_limits import CUDA_LIMITS, KIB
from tvm_ext.records.partition import CutlassProblem, EpilogueOperand, OperandRole

DEVICES: dict[tuple[int, int], str] = {(7, 5): "nvidia-t4", (8, 0): "nvidia-a100", (9, 0): "nvidia-h100"}
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0))
EXPRESSIONS = (
    "accum", "relu(accum + row)", "gelu(accum + row) * matrix", "gelu_tanh(accum + column)", "silu(accum) + matrix",
    "hardswish(accum * scalar + row)", "softplus(accum * -0.5)", "sigmoid(accum + row) * (accum + row)",
    "maximum(minimum(accum, 6), 0)", "tanh(cast(accum + row, 'float16')) - matrix", "accum * accum / 2 + exp(column)",
)  # fmt: skip
"""Every function, operator and role, values used twice, and rounding on the way."""


def device_of(capability: tuple[int, int]) -> DeviceSpec:
    """The device tables' row; for the capabilities without one, an A100 with their limits (and 8-bit floats)."""
    if capability in DEVICES:
        return device_db.lookup(DEVICES[capability])
    row, limits = device_db.lookup("nvidia-a100"), CUDA_LIMITS[capability]
    assert limits.opt_in_kib is not None
    shared = dataclasses.replace(
        row.layer("L1"), unit_capacity_bytes=limits.shared_kib * KIB, opt_in_capacity_bytes=limits.opt_in_kib * KIB
    )
    return dataclasses.replace(
        row,
        name=f"like-sm{capability[0]}{capability[1]}",
        compute_capability=capability,
        layers=tuple(shared if layer.name == "L1" else layer for layer in row.layers),
        max_threads_per_unit=limits.threads,
        max_blocks_per_unit=limits.blocks,
    )


def architecture_of(capability: tuple[int, int]) -> str:
    """What nvcc compiles for."""
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def epilogue_of(expression: str, out_dtype: str) -> Epilogue:
    """With the operands that ``expression`` names, each called by its role; half of them of the result's type."""
    roles: tuple[OperandRole, ...] = ("row", "column", "matrix", "scalar")
    narrow = out_dtype if out_dtype not in ("int8", "int32") else "float32"
    dtypes = {"row": narrow, "matrix": narrow}
    used = [role for role in roles if re.search(rf"\b{role}\b", expression)]
    operands = tuple(EpilogueOperand(name=role, role=role, dtype=dtypes.get(role, "float32")) for role in used)
    return Epilogue(expression=expression, operands=operands, out_dtype=out_dtype)


def legal_configs(problem: CutlassProblem, device: DeviceSpec, epilogue: Epilogue) -> list[GemmConfig]:
    """All of them, in the order in which they are looked at."""
    return list(ProductFamily(problem, device, epilogue).legal())


def arithmetics_of(device: DeviceSpec) -> list[str]:
    """What templates for ``device`` multiply."""
    problems = [packed_problem(m=64, n=64, k=64, arithmetic=name, out_dtype="float32") for name in MULTIPLIERS]
    families = [ProductFamily(problem, device, Epilogue(out_dtype="float32")) for problem in problems]
    return [family.problem.arithmetic for family in families if next(family.candidates(), None) is not None]
