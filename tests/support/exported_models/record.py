"""What one network, exported in one way and built for one device, came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "wrong", "failed", "crashed", "timed out", "not exported"]

EXPORTERS = ("dynamo", "torchscript")
"""The two of torch.onnx.export: by torch.export's graph (``dynamo=True``), and by TorchScript's."""

PROGRAM = "program"
"""No exporter of ONNX files: torch.export's program, imported as it is and compared with torch."""

CPU = "llvm"

TOLERANCE = 1e-4
"""Of each float output, relative by norm; what is observed is below 1e-5."""


LEAST_VARIATION = 100 * TOLERANCE
"""Between the outputs for two inputs: a network that answers every input alike would compare nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """``variation``: relative difference by norm of the outputs for two inputs, which says what ``error`` is worth."""

    network: str
    exporter: str
    device: str
    outcome: Outcome
    problem: str = ""
    error: float | None = None
    variation: float | None = None
    import_s: float | None = None
    build_s: float | None = None
    paths: tuple[tuple[str, int], ...] = ()

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"
