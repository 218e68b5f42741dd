"""Random legal configurations over all templates of convolutions go through nvcc: what is proposed compiles."""

from __future__ import annotations

import pytest

from tests.unit.byoc_cutlass.convolutions import random_convolution
from tests.unit.byoc_cutlass.gemms import architecture_of
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.emit_convolution import emit_convolution
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

pytest.importorskip("cutlass_library", reason="the extra `cutlass` is not installed")

COUNT = 100


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_what_is_proposed_compiles(seed: int) -> None:
    capability, _, config, epilogue = random_convolution(seed)
    done = compile_gemm(emit_convolution(config, epilogue), architecture_of(capability), time_limit_s=580)
    assert done.image.startswith(b"\x7fELF")
    assert done.uses
