"""Element types as the templates know them: names in C++ and in the tracer, widths, and what multiplies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tvm_ext.devices.capabilities import LDMATRIX_SINCE, MMA_SYNC_SINCE
from tvm_ext.errors import InputError

Shape3 = tuple[int, int, int]
"""M, N, K."""
Instruction = tuple[tuple[int, int], Shape3]
"""The compute capability since which there is one, and its shape (PTX ISA, mma.sync)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """A type of tensors: its name in C++, in ``cutlass_library.DataType``, and its width."""

    cpp: str
    library: str
    bits: int


ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        "float32": Element(cpp="float", library="f32", bits=32),
        "float16": Element(cpp="cutlass::half_t", library="f16", bits=16),
        "bfloat16": Element(cpp="cutlass::bfloat16_t", library="bf16", bits=16),
        "float8_e4m3fn": Element(cpp="cutlass::float_e4m3_t", library="e4m3", bits=8),
        "float8_e5m2": Element(cpp="cutlass::float_e5m2_t", library="e5m2", bits=8),
        "int8": Element(cpp="int8_t", library="s8", bits=8),
        "int32": Element(cpp="int32_t", library="s32", bits=32),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiplier:
    """What multiplies matrices of one kind: the operands' and the sum's types, the instructions of 2.x templates.

    ``peak`` is the key of `DeviceSpec.peak_gflops`, ``instructions`` begin with the oldest; empty for the vector units.
    ``results`` are what a product of the graph may be stored as before its epilogue, ``since`` the oldest architecture
    that has templates. ``k_contiguous`` says that operands lie along K in memory, as matrix units read 8-bit numbers.
    """

    operand: str
    accumulator: str
    results: tuple[str, ...]
    peak: tuple[str, ...]
    instructions: tuple[Instruction, ...] = ()
    operator: str = "OpMultiplyAdd"
    k_contiguous: bool = False

    @property
    def bits(self) -> int:
        return ELEMENTS[self.operand].bits

    @property
    def since(self) -> tuple[int, int]:
        return self.instructions[0][0] if self.instructions else TEMPLATES_SINCE


TEMPLATES_SINCE = (7, 5)
"""The oldest architecture that CUDA 13, the compiler of these templates, generates code for."""

FP8_SINCE = (8, 9)
"""mma.sync of 8-bit floats (PTX ISA)."""

# Shapes of mma.sync (PTX ISA).
_HALVES, _FP8 = (MMA_SYNC_SINCE, (16, 8, 16)), (FP8_SINCE, (16, 8, 32))
_TFLOAT32 = (MMA_SYNC_SINCE, (16, 8, 8))
_INT8 = ((LDMATRIX_SINCE, (8, 8, 16)), (MMA_SYNC_SINCE, (16, 8, 32)))


def _floats(
    operand: str,
    *peak: str,
    instructions: tuple[Instruction, ...] = (),
    narrow: tuple[str, ...] = (),
    along_k: bool = False,
) -> Multiplier:
    """Accumulated in float32, which is stored as it is or as one of the ``narrow`` types."""
    return Multiplier(
        operand=operand, accumulator="float32", results=(*narrow, "float32"), peak=peak, instructions=instructions,
        k_contiguous=along_k,
    )  # fmt: skip


_FLOAT16 = ((LDMATRIX_SINCE, (16, 8, 8)), _HALVES)  # of mma.sync (PTX ISA)
_NARROW = ("float16", "bfloat16")
MULTIPLIERS: Mapping[str, Multiplier] = MappingProxyType(
    {
        "float16": _floats("float16", "float16_tensor", instructions=_FLOAT16, narrow=("float16",)),
        "bfloat16": _floats("bfloat16", "bfloat16_tensor", instructions=(_HALVES,), narrow=("bfloat16",)),
        "tfloat32": _floats("float32", "tfloat32_tensor", instructions=(_TFLOAT32,)),
        "float32": _floats("float32", "float32"),
        "int8": Multiplier(
            operand="int8", accumulator="int32", results=("int32",), peak=("int8_tensor",), instructions=_INT8,
            k_contiguous=True, operator="OpMultiplyAddSaturate",
        ),
    }
    | {
        name: _floats(name, "float8_tensor", "int8_tensor", instructions=(_FP8,), narrow=_NARROW, along_k=True)
        for name in ("float8_e4m3fn", "float8_e5m2")
    }
)  # fmt: skip
"""By the name of the arithmetic: tfloat32 multiplies float32 tensors on matrix units, float32 on the vector units."""


def element(dtype: str) -> Element:
    """The element type called ``dtype``; raises InputError where the templates have none."""
    if dtype not in ELEMENTS:
        raise InputError(f"CUTLASS templates have no tensors of {dtype}.", f"known are {', '.join(ELEMENTS)}")
    return ELEMENTS[dtype]


def multiplier(arithmetic: str) -> Multiplier:
    """What multiplies ``arithmetic``; raises InputError where the templates have nothing for it."""
    if arithmetic not in MULTIPLIERS:
        raise InputError(f"CUTLASS templates do not multiply {arithmetic}.", f"known are {', '.join(MULTIPLIERS)}")
    return MULTIPLIERS[arithmetic]
