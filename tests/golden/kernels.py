"""Kernels whose emitted text is kept: small operators that together pass through every emitter.

Each is constructed for a row of the device tables, so that its text is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax, te, tirx

from tests.support.opencl_cpu import compile_opencl
from tests.support.pipelining.check import cuda_source
from tests.support.pipelining.constructed import applied_product, convolution, single_product
from tests.support.product_chains import chain, function_of
from tests.support.recurrent_cells import CellCase, gru_before, lstm
from tests.unit.kernels import constructed, legalised
from tests.unit.tir_passes.emit.tensor_core_operators import fused_matmul
from tvm_ext.devices.device_db import as_opencl, lookup
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE
from tvm_ext.tir_passes.construct_kernels import construct_kernel

op = relax.op
AVX512, AVX2 = "cpu-epyc-zen5", "cpu-cascade-lake-avx2"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GoldenKernel:
    """A kernel in the file ``name``, whose ending says the language: ``.tir``, ``.cu`` or ``.cl``."""

    name: str
    emit: Callable[[], str]

    def __str__(self) -> str:
        return self.name


def golden_kernels() -> tuple[GoldenKernel, ...]:
    return (*_cpu_kernels(), *_gpu_kernels())


# --- CPUs -------------------------------------------------------------------------------------------------------------
def tensor_ir(device: str, build: Callable[..., Any], *shapes: tuple[int, ...], constants: tuple[int, ...] = ()) -> str:
    """The kernel of ``build(*inputs)`` as TVMScript, without the record of its choice."""
    kernel, _ = constructed(legalised(build, *shapes), constants=constants, device=lookup(device))
    return str(kernel.without_attr(CHOICE).script())


def _dense_gelu(x: Any, w: Any, b: Any) -> Any:
    return op.nn.gelu(op.add(op.matmul(x, w), b))


def _strided_conv(x: Any, w: Any) -> Any:
    return op.nn.relu(op.nn.conv2d(x, w, strides=2, padding=1))


def _padded_conv(x: Any, w: Any) -> Any:
    return op.nn.relu(op.nn.conv2d(x, w, padding=1))


def _depthwise(x: Any, w: Any) -> Any:
    return op.clip(op.nn.conv2d(x, w, groups=4, padding=1), 0.0, 6.0)


def _average_pool(x: Any) -> Any:
    return op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1))


def _functions(x: Any) -> Any:
    return op.add(op.tanh(x), op.log(op.sigmoid(x)))


def _cpu_kernels() -> tuple[GoldenKernel, ...]:
    """Packed weights, reductions in chunks, columns sorted by phase, results turned in registers; windows; rows;
    functions as arithmetic.
    """
    cases: dict[str, Callable[[], str]] = {
        "cpu_tiles_dense_gelu": partial(tensor_ir, AVX512, _dense_gelu, (30, 64), (64, 48), (48,), constants=(1,)),
        "cpu_tiles_filters": partial(tensor_ir, AVX2, _strided_conv, (1, 3, 30, 30), (16, 3, 3, 3), constants=(1,)),
        "cpu_tiles_columns": partial(tensor_ir, AVX512, _strided_conv, (1, 8, 33, 65), (3, 8, 3, 3)),
        "cpu_tiles_chunks": partial(tensor_ir, AVX512, _padded_conv, (1, 64, 23, 23), (32, 64, 3, 3), constants=(1,)),
        "cpu_tiles_thrashing": partial(tensor_ir, AVX512, op.matmul, (256, 1024), (1024, 1024)),
        "cpu_windows_depthwise": partial(tensor_ir, AVX512, _depthwise, (1, 4, 14, 30), (4, 1, 3, 3), constants=(1,)),
        "cpu_windows_average_pool": partial(tensor_ir, AVX2, _average_pool, (1, 4, 13, 21)),
        "cpu_rows_softmax": partial(tensor_ir, AVX512, op.nn.softmax, (12, 200)),
        "cpu_rows_functions": partial(tensor_ir, AVX512, _functions, (100, 200)),
    }
    cases |= {
        "cpu_cells_lstm": partial(_cell, AVX2, lstm(12, 1)),
        "cpu_cells_gru": partial(_cell, AVX512, gru_before(20, 3)),
    }
    return tuple(GoldenKernel(name=f"{name}.tir", emit=emit) for name, emit in cases.items())


def _cell(device: str, case: CellCase) -> str:
    kernel, _ = constructed(case.function(), constants=case.weights, device=lookup(device))
    return str(kernel.without_attr(CHOICE).script())


# --- GPUs -------------------------------------------------------------------------------------------------------------
def cuda(device: str, make: Callable[[], Any], **options: Any) -> str:
    """The CUDA of ``make()``'s kernels for ``device``, without stock TVM's functions in front of them."""
    row = lookup(device)
    architecture = str(dict(row.target)["arch"])
    return _kernels_of(cuda_source(_gpu_kernel(make(), row, options), architecture))


def opencl(device: str, make: Callable[[], Any], **options: Any) -> str:
    """The OpenCL C of ``make()``'s kernels for ``device``."""
    return compile_opencl(_gpu_kernel(make(), as_opencl(lookup(device)), options)).source


def _gpu_kernel(func: Any, device: Any, options: dict[str, Any]) -> Any:
    return construct_kernel(func, "main", device, BuildOptions(**options))


def _kernels_of(source: str) -> str:
    return source[source.index('extern "C" __global__') :]


def _layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    return op.nn.layer_norm(x, scale, shift, axes=[-1])


def _positive(x: Any) -> Any:
    return te.max(x, tirx.const(0, "float16"))


def _bias_relu(x: Any, bias: Any) -> Any:
    return op.nn.relu(op.add(x, bias))


def _gpu_kernels() -> tuple[GoldenKernel, ...]:
    """Vector and matrix units with copies by registers, by cp.async and in bulk; rows, points and transpositions."""
    bulk = {"bulk_copies": True, "enable_pipelining": True}
    cases: dict[str, Callable[[], str]] = {
        "simt_tiles_v100.cu": partial(cuda, "nvidia-v100", partial(single_product, 60, 92, 256)),
        "simt_tiles_bulk_h200.cu": partial(cuda, "nvidia-h200", partial(single_product, 64, 64, 72), **bulk),
        "simt_tiles_conv_mi50.cl": partial(
            opencl, "amd-mi50", partial(legalised, _strided_conv, (1, 8, 15, 15), (16, 8, 3, 3))
        ),
        "mma_tiles_fused_a100.cu": partial(cuda, "nvidia-a100", lambda: fused_matmul(128, 128, 256)[0]),
        "mma_tiles_relu_a100.cu": partial(
            cuda, "nvidia-a100", partial(applied_product, 64, 64, 160, _positive, "a"), enable_pipelining=True
        ),
        "mma_tiles_conv_v100.cu": partial(
            cuda, "nvidia-v100", partial(convolution, (1, 14, 14, 32), (3, 3, 32, 32), 1, 1)
        ),
        "gpu_chains_a100.cu": partial(
            cuda, "nvidia-a100", lambda: function_of(chain(64, 64, 32, 16)), enable_persistent_fusion=True
        ),
        "gpu_chains.cl": partial(
            opencl, "amd-mi50", lambda: function_of(chain(60, 12, 8, 4, dtype="float32")), enable_persistent_fusion=True
        ),
        "gpu_rows_layer_norm_a100.cu": partial(
            cuda, "nvidia-a100", partial(legalised, _layer_norm, (64, 768), (768,), (768,))
        ),
        "gpu_rows_softmax.cl": partial(opencl, "nvidia-v100", partial(legalised, op.nn.softmax, (12, 200))),
        "gpu_rows_sum.cl": partial(opencl, "nvidia-v100", partial(legalised, op.sum, (3, 5, 70000))),
        "gpu_rows_points_a100.cu": partial(
            cuda, "nvidia-a100", partial(legalised, _bias_relu, (64, 768), (768,), dtype="float16")
        ),
        "gpu_rows_turn.cl": partial(opencl, "nvidia-v100", partial(legalised, op.permute_dims, (70, 90))),
    }
    return tuple(GoldenKernel(name=name, emit=emit) for name, emit in cases.items())
