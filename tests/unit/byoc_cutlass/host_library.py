"""Texts of kernels as libraries whose host functions run on the CPU: no kernel is started, so no GPU is needed."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from tvm_ext.byoc_cutlass._cutlass import include_folders
from tvm_ext.toolchains.cuda_toolchain import find_nvcc

BY_THREADS = """
// Calls ``change`` with the sums of every thread that multiplies by ``Tiled``, and with their places, for the tile of
// ``Shape`` at ``block`` and ``step``, row by row in ``tile``.
template <class Tiled, class Shape, class Change>
void by_threads(int block, int step, float* tile, Change const& change) {
  constexpr int width = cute::size<1>(Shape{}), height = cute::size<0>(Shape{});
  for (int thread = 128; thread < 384; ++thread) {  // the first 128 copy
    int const group = thread / 128 - 1;
    auto const extents = cute::take<0, 2>(Shape{});
    auto places = Tiled{}.get_thread_slice(thread).partition_C(cute::make_identity_tensor(extents));
    auto sums = cute::partition_fragment_C(Tiled{}, extents);
    auto at = [&](int i) -> float& {
      return tile[(group * height + cute::get<0>(places(i))) * width + cute::get<1>(places(i))];
    };
    for (int i = 0; i < int(cute::size(sums)); ++i) sums(i) = at(i);
    auto moved = cute::make_tensor(
        places.data() + cute::E<0>{} * ((2 * block + group) * height) + cute::E<1>{} * (step * width),
        places.layout());
    change(sums, moved);
    for (int i = 0; i < int(cute::size(sums)); ++i) at(i) = sums(i);
  }
}
"""
"""How the warp groups of example 88 hold a tile of sums; for text behind a template's."""


def host_library(text: str, folder: Path, architecture: str = "sm_80") -> ctypes.CDLL:
    """``text``, compiled and loaded."""
    source, library = folder / "kernel.cu", folder / "kernel.so"
    source.write_text(text)
    includes = [item for path in include_folders() for item in ("-I", str(path))]
    flags = [
        "-std=c++17",
        f"-arch={architecture}",
        "--expt-relaxed-constexpr",
        "-w",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        *includes,
    ]
    subprocess.run([str(find_nvcc().path), *flags, str(source), "-o", str(library)], check=True, timeout=500)
    return ctypes.CDLL(str(library))


class ConvolutionCall(ctypes.Structure):
    """`emit_convolution.CALL`, of C: the same members in the same order."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")),
        *((name, ctypes.c_int32) for name in ("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w")),
        *((name, ctypes.c_int32) for name in ("groups", "split_k", "swizzle", "raster_along_m", "reserved")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "operands", "d")),
    ]


def address(array: np.ndarray) -> int:
    """Of its first element."""
    return int(array.ctypes.data)


def convolved(x: np.ndarray, w: np.ndarray, call: ConvolutionCall) -> np.ndarray:
    """NHWC by OHWI in float64, position by position."""
    result = np.zeros((call.n, call.p, call.q, call.k))
    channels, filters = call.c // call.groups, call.k // call.groups
    below = (call.p - 1) * call.stride_h + (call.r - 1) * call.dilation_h + 1
    right = (call.q - 1) * call.stride_w + (call.s - 1) * call.dilation_w + 1
    padded = np.zeros((call.n, max(below, call.h + call.pad_h), max(right, call.w + call.pad_w), call.c))
    padded[:, call.pad_h : call.pad_h + call.h, call.pad_w : call.pad_w + call.w] = x
    for r in range(call.r):
        for s in range(call.s):
            rows = r * call.dilation_h + np.arange(call.p) * call.stride_h
            columns = s * call.dilation_w + np.arange(call.q) * call.stride_w
            pixels = padded[:, rows][:, :, columns]
            for group in range(call.groups):
                part = slice(group * filters, (group + 1) * filters)
                factor = w[part, r, s].astype("float64").T
                result[..., part] += pixels[..., group * channels : (group + 1) * channels] @ factor
    return result
