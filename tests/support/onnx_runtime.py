"""ONNX Runtime, which commands compare with; where it is missing they end with what to install."""

from __future__ import annotations

try:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as states
except ModuleNotFoundError as error:
    raise SystemExit(f"error: this needs {error.name}.\n  remedy: pip install 'tvm-ext[bench]'") from error

__all__ = ["onnxruntime", "states"]
