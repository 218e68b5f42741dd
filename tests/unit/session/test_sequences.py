"""Sequences: what takes or gives them together with a refused operator stays in ONNX Runtime, the rest is compiled."""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import pytest

from tests.support import sequence_models
from tvm_ext import InferenceSession, _native, register_execution_provider
from tvm_ext.errors import ModelError

each_kind = pytest.mark.parametrize("kind", sequence_models.KINDS)


def _wanted(model: onnx.ModelProto, feed: dict[str, Any]) -> Any:
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return peer.run(None, feed)[0]


@pytest.mark.parametrize("rows", [1, "batch"])
@each_kind
def test_a_session_compiles_what_takes_and_gives_tensors(kind: str, rows: int | str) -> None:
    model, feed = sequence_models.model(kind, rows), sequence_models.feed(kind)
    session = InferenceSession(model)
    sequence_models.assert_same(session.run(None, feed)[0], _wanted(model, feed))
    engines = "".join(piece.engine[0] for piece in session.report.pieces)
    assert engines == ("to" if "result" in kind else "tot")


@each_kind
def test_they_are_refused_by_name_where_onnx_runtime_may_not_run(kind: str) -> None:
    with pytest.raises(ModelError, match=r"is a sequence|a sequence or optional value|the sequence is an input"):
        InferenceSession(sequence_models.model(kind), enable_fallback=False).run(None, sequence_models.feed(kind))


@pytest.mark.skipif(_native.library_path(_native.PROVIDER_LIBRARY) is None, reason="the native part is not built here")
@each_kind
def test_the_provider_leaves_them_to_onnx_runtime(kind: str) -> None:
    model, feed = sequence_models.model(kind), sequence_models.feed(kind)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.add_provider_for_devices(register_execution_provider(), {})
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    session.disable_fallback()  # it would run the whole model again where the provider fails
    sequence_models.assert_same(session.run(None, feed)[0], _wanted(model, feed))
    parts = session.get_provider_graph_assignment_info()
    assigned = {node.op_type: part.ep_name for part in parts for node in part.get_nodes()}
    assert assigned.pop("MatMul") == "TvmExtExecutionProvider"
    assert set(assigned.values()) == {"CPUExecutionProvider"}
