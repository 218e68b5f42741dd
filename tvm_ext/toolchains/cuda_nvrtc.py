"""NVRTC 12.9 from Python packages (``pip install tvm-ext[cuda12]``), for devices that CUDA 13 has dropped (sm_70).

NVRTC is a library: it compiles CUDA C++ to PTX without a host compiler. Each run is a process of its own
(`cuda_nvrtc_worker.py`, which needs nothing but Python), so that it can be stopped when it hangs. The packages put
their headers into four folders; it is told all four.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tvm_ext._environment import installed_version
from tvm_ext.devices.capabilities import architecture_suffix

CUBIN = "kernels.cubin"
OLDEST = 50
"""The oldest architecture that CUDA 12 compiles for; 12.0 dropped Kepler (the K80's sm_37)."""
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)")
_PACKAGE = "nvidia-cuda-nvrtc-cu12"
_HEADERS = ("cuda_runtime", "cuda_cccl", "cuda_nvcc")  # cuda_fp16.h and mma.h; libcu++; crt/
_WORKER = Path(__file__).with_name("cuda_nvrtc_worker.py")

PREAMBLE = """\
#include <cuda/std/cstdint>
using cuda::std::uint8_t; using cuda::std::uint16_t; using cuda::std::uint32_t; using cuda::std::uint64_t;
using cuda::std::int8_t; using cuda::std::int16_t; using cuda::std::int32_t; using cuda::std::int64_t;
#include <cuda/std/limits>
#ifndef INFINITY
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
#endif
"""
"""What nvcc takes from the host's headers and NVRTC has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvrtc:
    """An installed NVRTC: its library, ptxas beside it, the folders of its headers."""

    library: Path
    ptxas: Path
    includes: tuple[Path, ...]
    version: str


def find_nvrtc() -> Nvrtc | None:
    """The NVRTC 12.9 of the installed packages; None where a part is missing."""
    spec, version = importlib.util.find_spec("nvidia"), installed_version(_PACKAGE) or "of unknown version"
    for root in map(Path, spec.submodule_search_locations or () if spec else ()):
        found = (root / "cuda_nvrtc" / "lib").glob("libnvrtc.so.*")
        libraries = [path for path in found if _LIBRARY.fullmatch(path.name)]
        ptxas = root / "cuda_nvcc" / "bin" / "ptxas"
        includes = tuple(root / name / "include" for name in _HEADERS)
        if libraries and ptxas.is_file() and all(folder.is_dir() for folder in includes):
            return Nvrtc(library=libraries[0], ptxas=ptxas, includes=includes, version=version)
    return None


def prepare(source: str, architecture: str, nvrtc: Nvrtc, folder: Path) -> list[str]:
    """Write what the worker needs into ``folder``; answers the command that leaves `CUBIN` there.

    ``architecture`` is "sm_70": NVRTC makes PTX for compute_70, from which ptxas makes the machine code and its report.
    """
    suffix = architecture_suffix(architecture)
    job = {
        "library": str(nvrtc.library),
        "source": "kernels.cu",
        "ptx": "kernels.ptx",
        "options": [
            f"--gpu-architecture=compute_{suffix}",
            "--std=c++17",
            "--device-as-default-execution-space",
            *(f"--include-path={path}" for path in nvrtc.includes),
        ],
        "assemble": [str(nvrtc.ptxas), "-v", "-O3", f"-arch={architecture}", "-o", CUBIN, "kernels.ptx"],
    }
    (folder / "kernels.cu").write_text(PREAMBLE + source)
    (folder / "job.json").write_text(json.dumps(job))
    return [sys.executable, "-I", str(_WORKER), "job.json"]
