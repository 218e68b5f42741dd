"""Random operators, built, run and compared.

    python -m tests.support.random_operators --count 2000 --seed 0 --jobs 2
    python -m tests.support.random_operators --case 417            # one case in this process, with its kernels
    python -m tests.support.random_operators --device nvidia-a100 --device amd-mi50    # GPU kernels, through OpenCL
    python -m tests.support.random_operators --tensors bfloat16    # the same operators, all floats bfloat16

Exits with 1 where a case failed.
"""

from __future__ import annotations

from dataclasses import replace

from ..random_cases import Family, Settings, command
from .check import attempt, check, stock_error
from .draw import KINDS, draw_case, with_floats
from .opencl import in_turn
from .record import OperatorCase


def drawn(seed: int, index: int, settings: Settings) -> OperatorCase:
    """Case ``index`` of ``seed``, for ``settings``."""
    case = in_turn(with_floats(draw_case(seed, index), settings.tensors), settings.devices)
    return replace(case, precision=settings.precision)


FAMILY = Family(
    name="operators", what="random operators against float64 NumPy", kinds=KINDS, draw=drawn, run=check,
    attempt=attempt, hint=stock_error,
)  # fmt: skip
app = command(FAMILY)

if __name__ == "__main__":
    app()
