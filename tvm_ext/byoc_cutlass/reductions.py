"""Epilogues that end in a sum or maximum over all rows or all columns: one vector is stored in place of the matrix.

An expression says so with its outermost call, ``sum_rows(relu(accum + bias))``. Templates of 2.x add what a threadblock
has to the result by atomic operations (visitor_store.hpp, VisitorRowReduction and VisitorColReduction), so that the
result is set to what changes nothing before the kernel starts, and sums of floats may differ in their last bits from
run to run. Collectives always store a matrix: on sm_90 these are sm_80's templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm_ext.records.partition import REDUCTION_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """``function`` of all values along "rows" (one for each column is left) or "columns" (one for each row)."""

    function: Literal["sum", "max"]
    over: Literal["rows", "columns"]

    @property
    def left(self) -> str:
        """The extent of a problem that is left: n, or m."""
        return "n" if self.over == "rows" else "m"

    @property
    def identity(self) -> str:
        """C++ of what changes no value."""
        return "0.f" if self.function == "sum" else "-std::numeric_limits<float>::infinity()"

    @property
    def unchanged_byte(self) -> int:
        """What the result is filled with: 0, or a NaN of all ones, which `ATOMIC_MAXIMUM` takes for less than all."""
        return 0x00 if self.function == "sum" else 0xFF


REDUCTIONS: dict[str, Reduction] = {
    "sum_rows": Reduction(function="sum", over="rows"),
    "sum_columns": Reduction(function="sum", over="columns"),
    "max_rows": Reduction(function="max", over="rows"),
    "max_columns": Reduction(function="max", over="columns"),
}
"""By their names in expressions."""

assert REDUCTIONS.keys() == REDUCTION_STEPS

ATOMIC_MAXIMUM = """
namespace tvm_ext {

// The maximum of floats in memory that starts as all ones: of positive numbers by their bits as int, of negative ones,
// whose bits fall, by the minimum as unsigned. NaN is the largest int, so that it stays; CUTLASS's may lose it.
template <class Number> struct AtomicMaximum {
  CUTLASS_DEVICE void operator()(float* to, float value) const {
    int const bits = value != value ? 0x7fffffff : __float_as_int(value);
    if (0 <= bits) {
      atomicMax(reinterpret_cast<int*>(to), bits);
    } else {
      atomicMin(reinterpret_cast<unsigned*>(to), static_cast<unsigned>(bits));
    }
  }
};

}  // namespace tvm_ext
"""
"""In place of CUTLASS's, which tells NaNs with a sign from numbers by nothing."""


def fill_result(reduction: Reduction | None, rows: str, columns: str) -> str:
    """C++ of an entry point that fills the result before the kernel starts; ``rows`` and ``columns`` are C++, too."""
    if reduction is None:
        return ""
    count = columns if reduction.over == "rows" else rows
    return f"""  if (cudaMemsetAsync(call->d, {reduction.unchanged_byte:#04x}, sizeof(float) * ({count}),
                      static_cast<cudaStream_t>(stream)) != cudaSuccess)
    return static_cast<int32_t>(cutlass::Status::kErrorInternal);
"""


def stored_elements(reduction: Reduction | None, rows: int, columns: int, batch: int = 1) -> int:
    """Elements of the result of ``batch`` products of ``rows`` by ``columns``."""
    if reduction is None:
        return rows * columns * batch
    return columns if reduction.over == "rows" else rows * batch


def exchange_bytes(reduction: Reduction | None, columns: int, threads: int, access: int) -> int:
    """Shared memory in which the threads of a 2.x template's block add up rows; each has ``access`` columns at a time.

    Worked example: 128 columns, 256 threads, 4 at a time: 32 threads side by side, so 8 rows of 128 sums.
    """
    if reduction is None or reduction.over == "columns":
        return 0
    across = min(32, columns // access)
    return threads // across * columns * 4
