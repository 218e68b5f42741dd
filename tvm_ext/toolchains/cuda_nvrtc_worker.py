"""One run of NVRTC and ptxas as a program of its own: ``python -I cuda_nvrtc_worker.py job.json``, in the job's folder.

Imports the standard library alone. The job names NVRTC's library and options, the source, and the assembler's command.
Prints what both compilers say; exits with 1 where one of them fails.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(job_path: str) -> int:
    """Compile and assemble as the JSON file says."""
    job: dict[str, Any] = json.loads(Path(job_path).read_text())
    nvrtc = ctypes.CDLL(job["library"])
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()
    source = Path(job["source"]).read_bytes()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None))
    arguments = [item.encode() for item in job["options"]]
    status = nvrtc.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    sys.stdout.write(_fetch(nvrtc, program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace"))
    if status:
        return 1
    Path(job["ptx"]).write_bytes(_fetch(nvrtc, program, "nvrtcGetPTX").rstrip(b"\0"))
    sys.stdout.flush()
    return subprocess.run(job["assemble"], check=False).returncode


def _fetch(nvrtc: Any, program: ctypes.c_void_p, function: str) -> bytes:
    """The text that ``function`` gives, whose length ``function`` + "Size" gives."""
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"{function}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, function)(program, text))
    return text.raw


def _check(nvrtc: Any, status: int) -> None:
    if status:
        sys.exit(f"error: NVRTC says {nvrtc.nvrtcGetErrorString(status).decode()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
