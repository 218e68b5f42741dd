"""FuseOperators: stock fusion, left out where a shape depends on data."""

from __future__ import annotations

import numpy as np
import tvm
from onnx import TensorProto, helper

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import assert_structural_equal, relax
from tvm_ext.relay_passes.fuse_operators import FuseOperators


def legalised(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()])(mod)


def test_a_chain_becomes_one_function(immutable_modules):
    x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    mod = legalised(module_of([x], relax.op.exp(relax.op.nn.relu(x))))
    expected = tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])(mod)
    assert_structural_equal(FuseOperators()(mod), expected)
    assert len(expected.get_global_vars()) == 2


def test_a_length_that_is_computed_builds_and_runs():
    nodes = [
        helper.make_node("Range", ["start", "limit", "delta"], ["steps"]),
        helper.make_node("Cos", ["steps"], ["waves"]),
        helper.make_node("Mul", ["waves", "waves"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("start", "limit", "delta")]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph(nodes, "range", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    mod, params = relay.frontend.from_onnx(model)
    library = relay.build(mod, "llvm", params=params)
    values = [np.array(value, "f4") for value in (1.0, 6.0, 0.5)]
    result = library.vm(tvm.cpu())["main"](*values).numpy()
    np.testing.assert_allclose(result, np.cos(np.arange(1.0, 6.0, 0.5)) ** 2, rtol=1e-6)
