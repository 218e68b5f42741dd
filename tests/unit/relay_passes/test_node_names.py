"""Kernels know the nodes of the model: from the import through fusion, layouts and attention to the report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.records.nodes import CallSite
from tvm_ext.relay_passes.node_names import call_sites, imported_nodes, label, node_of
from tvm_ext.support.kernel_cache import KernelCache

ZEN = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}


def sites_of(model: onnx.ModelProto) -> tuple[CallSite, ...]:
    options = BuildOptions.current(device="cpu-epyc-zen5", kernel_cache="off")
    plan = plan_build(ZEN, options, KernelCache.for_build(options))
    mod, params = relay.frontend.from_onnx(model)
    mod = relay.prepare(mod, params, may_loop=True)
    with plan.target:
        return call_sites(operator_pipeline(plan.target, plan.device, options)(mod), imported_nodes(mod))


def network(nodes: list[onnx.NodeProto], x: list[int], weights: Mapping[str, list[int]]) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(generator.standard_normal(shape).astype("float32"), name)
        for name, shape in weights.items()
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "net", [value("x", TensorProto.FLOAT, x)], [value("y", TensorProto.FLOAT, None)], constants
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def named(nodes: list[tuple[str, list[str], str, str]]) -> list[onnx.NodeProto]:
    return [helper.make_node(kind, inputs, [output], name) for kind, inputs, output, name in nodes]


def test_labels_are_read_back_and_other_names_are_none() -> None:
    assert [node_of(label(12)), node_of(label(12) + "3")] == [12, 12]
    assert [node_of(name) for name in ("lv12", "n12", "x", "gv")] == [None] * 4


def test_equal_kernels_at_two_places_have_the_nodes_of_each() -> None:
    nodes = named(
        [
            ("MatMul", ["x", "w"], "a", "layers/0/product"),
            ("Relu", ["a"], "b", "layers/0/relu"),
            ("MatMul", ["b", "v"], "c", "layers/1/product"),
            ("Relu", ["c"], "d", "layers/1/relu"),
            ("Softmax", ["d"], "y", ""),
        ]
    )
    first, second, last = sites_of(network(nodes, [8, 32], {"w": [32, 32], "v": [32, 32]}))
    assert first.function == second.function
    assert [str(node) for node in first.nodes] == ["MatMul layers/0/product", "Relu layers/0/relu"]
    assert [str(node) for node in second.nodes] == ["MatMul layers/1/product", "Relu layers/1/relu"]
    assert [str(node) for node in last.nodes] == ["Softmax y"]  # without a name it has its output's
    assert [site.reads for site in (first, second, last)] == [(), (0,), (1,)]
    assert (first.operands[0], first.result, first.dtype) == ("8x32", "8x32", "float32")
    assert first.nodes[0].shape == "8x32"


def test_a_node_that_is_there_twice_draws_no_others_in() -> None:
    """The second ReLU is computed by the first: what reads it has no part of what is before."""
    nodes = named(
        [
            ("MatMul", ["x", "w"], "a", "before"),
            ("Relu", ["a"], "b", "relu"),
            ("Relu", ["a"], "c", "again"),
            ("Softmax", ["b"], "d", "left"),
            ("MatMul", ["c", "v"], "e", "right"),
            ("Add", ["d", "e"], "y", "sum"),
        ]
    )
    sites = sites_of(network(nodes, [8, 32], {"w": [32, 32], "v": [32, 32]}))
    assert {str(site.nodes[0]) for site in sites} == {"MatMul before", "Softmax left", "MatMul right"}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mobilenet_block", {"conv2d": "Conv"}),
        ("bert_base_layer", {"matmul": "MatMul", "attention": "Softmax", "layer_norm": "LayerNormalization"}),
        ("lstm_tc", {"lstm_steps": "LSTM"}),
    ],
)
def test_every_kernel_of_a_network_has_nodes_of_its_kind(name: str, kinds: Mapping[str, str]) -> None:
    """Through blocked layouts, attention as one operator, and steps as a loop."""
    sites = sites_of(models.build_model(name))
    assert all(site.nodes for site in sites)
    for part, kind in kinds.items():
        found = [site for site in sites if part in site.function]
        assert found, part
        assert all(any(node.kind == kind for node in site.nodes) for site in found if site.shared == 1), part
