"""Random quantised operators and chains, imported from ONNX, built, run and compared.

    python -m tests.support.random_quantised --count 1000 --seed 0 --output counts.json
    python -m tests.support.random_quantised --case 417         # one case in this process, with its kernels

Exits with 1 where a case failed.
"""

from __future__ import annotations

from ..random_cases import Family, Settings, command
from .check import Number, attempt, check
from .writer import FORMS


def drawn(seed: int, index: int, _settings: Settings) -> Number:
    return Number(seed=seed, index=index)


FAMILY = Family(
    name="quantised operators", what="random quantised ONNX operators and chains against ONNX Runtime in float32",
    kinds=(*FORMS, "dynamic"), draw=drawn, run=check, attempt=attempt, has_settings=False,
)  # fmt: skip
app = command(FAMILY)

if __name__ == "__main__":
    app()
