"""Random legal configurations over all templates go through nvcc: what is proposed compiles."""

from __future__ import annotations

import random

import pytest

from tests.unit.byoc_cutlass.gemms import (
    CAPABILITIES,
    EXPRESSIONS,
    architecture_of,
    arithmetics_of,
    device_of,
    epilogue_of,
    legal_configs,
)
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.elements import MULTIPLIERS
from tvm_ext.byoc_cutlass.emit import emit_gemm
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import GemmConfig, GemmProblem
from tvm_ext.records.partition import Order
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

pytest.importorskip("cutlass_library", reason="the extra `cutlass` is not installed")

COUNT = 200
_EXTENTS = (64, 128, 200, 768, 1000, 1024, 4096)
_LAYOUTS: tuple[Order, ...] = ("row", "column")
_RESULTS = {"float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32"), "int8": ("int8", "int32")}


def random_gemm(seed: int) -> tuple[str, GemmProblem, GemmConfig, Epilogue]:
    """The same for a seed on every machine."""
    rng = random.Random(seed)
    capability = CAPABILITIES[seed % len(CAPABILITIES)]
    device = device_of(capability)
    while True:
        arithmetic = rng.choice(arithmetics_of(device))
        fp8 = arithmetic.startswith("float8")
        out = rng.choice(_RESULTS.get(arithmetic, ("float16", "bfloat16") if fp8 else ("float32",)))
        m, n, k = (rng.choice(_EXTENTS) for _ in range(3))
        along_k = MULTIPLIERS[arithmetic].k_contiguous
        layout_a, layout_b = ("row", "column") if along_k else (rng.choice(_LAYOUTS), rng.choice(_LAYOUTS))
        problem = GemmProblem.packed(
            m=m, n=n, k=k, arithmetic=arithmetic, layout_a=layout_a, layout_b=layout_b, out_dtype=out
        )
        epilogue = epilogue_of(rng.choice(EXPRESSIONS), out)
        legal = legal_configs(problem, device, epilogue)
        if legal:
            config = rng.choice(legal)
            split = rng.choice((1, 1, 2)) if config.schedule != "pingpong" and not config.is_simt else 1
            return architecture_of(capability), problem, config.with_split(split), epilogue


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_what_is_proposed_compiles(seed: int) -> None:
    architecture, problem, config, epilogue = random_gemm(seed)
    source = emit_gemm(config, epilogue, layout_a=problem.a.order, layout_b=problem.b.order)
    done = compile_gemm(source, architecture, time_limit_s=500)
    assert done.image.startswith(b"\x7fELF")
    assert done.uses
