"""``tvm-ext compile --onnxruntime``: a model that ONNX Runtime runs with compiled parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from tvm_ext.options import BuildOptions
from tvm_ext.runtime.library import Library

from . import common


def write_for_onnx_runtime(
    model: str, path: Path, target: str, shape: list[str] | None, batch: int, options: Mapping[str, Any]
) -> str:
    """Write ``path`` and the libraries beside it; says what was written, and how much of the model is compiled."""
    from tvm_ext import relay
    from tvm_ext.session import write_context_model

    def build(part: onnx.ModelProto, sizes: Mapping[str, Sequence[int]]) -> Library:
        mod, params = relay.frontend.from_onnx(part, shape=sizes)
        return relay.build(mod, target, params=params, options=BuildOptions.current(**options))

    loaded = common.load_model(model, batch)
    libraries = write_context_model(loaded, path, shape=common.parse_shapes(shape), build=build)
    kernels = sum(operator.calls for library in libraries for operator in library.report.operators)
    parts = "1 part" if len(libraries) == 1 else f"{len(libraries)} parts"
    return f"wrote {path}: {parts} compiled, {kernels} kernels; libraries beside it: {path.stem}.*.so"
