"""Random chains of operators, imported from ONNX, built, run and compared.

    python -m tests.support.random_chains --count 5000 --seed 0 --jobs 2 --output counts.json --results results.jsonl
    python -m tests.support.random_chains --case 417            # one chain in this process, with its kernels
    python -m tests.support.random_chains --device nvidia-a100 --device amd-mi50    # GPU kernels, through OpenCL
    python -m tests.support.random_chains --device nvidia-a100 --way templates --tensors float16    # CUTLASS
    python -m tests.support.random_chains --precision bfloat16    # or --tensors bfloat16

Exits with 1 where a chain failed. A run with ``--results`` that was stopped goes on where it was.
"""

from __future__ import annotations

from dataclasses import replace

from ..random_cases import WAYS, Family, Settings, command
from ..random_operators.opencl import in_turn
from .check import attempt, run_chain
from .draw import draw_case
from .draw_producers import PRODUCERS
from .record import ChainCase


def drawn(seed: int, index: int, settings: Settings) -> ChainCase:
    """Case ``index`` of ``seed``, for ``settings``; a precision of float32 products is about chains of float32."""
    floats = settings.tensors or ("" if settings.precision == "float32" else "float32")
    case = draw_case(seed, index, precision=settings.precision, floats=floats)
    return replace(in_turn(case, settings.devices), way=settings.way)


FAMILY = Family(
    name="chains", what="random chains of ONNX operators against ONNX Runtime",
    kinds=tuple(dict.fromkeys(kind for kind, _, _ in PRODUCERS)), draw=drawn, run=run_chain, attempt=attempt,
    ways=WAYS,
)  # fmt: skip
app = command(FAMILY)

if __name__ == "__main__":
    app()
