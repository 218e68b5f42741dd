"""Which attentions become one function, which do not and why, and what they compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper

from tests.support.attention_networks import FEATURES, FORMS, HEADS, KEYS, QUERIES, Network, Steps, attention, causal
from tests.support.attentions import LOWEST
from tvm_ext import relay
from tvm_ext._tvm import PrimFunc, assert_structural_equal, relax, structural_walk
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import attention_passes, graph_passes
from tvm_ext.records.attention import ATTENTION, Attention
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.fold_calls import FoldCalls
from tvm_ext.relay_passes.fuse_attention import FuseAttention
from tvm_ext.tir_passes.construct_kernels import construct_kernel

CPU = device_db.lookup("cpu-epyc-zen5")


def imported(model: onnx.ModelProto) -> Any:
    module, params = relay.frontend.from_onnx(model)
    return tvm.transform.Sequential(graph_passes())(relay.bind_params(module, params))


def fused(module: Any) -> tuple[Any, PersistentRecord]:
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        result = FuseAttention(CPU)(module)
        left = relax.transform.DeadCodeElimination()(result)  # which writes types into calls that have none
        left = FoldCalls()(left)
    return left, from_json(PersistentRecord, str(result.attrs[PERSISTENT]))


def kernels_of(module: Any) -> list[Any]:
    functions = [func for _, func in module.functions_items() if isinstance(func, PrimFunc)]
    return [func for func in functions if func.attrs and ATTENTION in func.attrs]


def functions_of(module: Any) -> list[Attention]:
    return [from_json(Attention, str(func.attrs[ATTENTION])) for func in kernels_of(module)]


def operators_of(module: Any) -> set[str]:
    names: set[str] = set()
    structural_walk(module["main"].body, (tvm.ir.Call, lambda call: names.add(str(getattr(call.op, "name", "")))))
    return names


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_exporters_write(form: str) -> None:
    steps, changes, scale = FORMS[form]
    module, record = fused(imported(attention(steps)))
    (work,) = functions_of(module)
    assert [region.fused for region in record.regions] == [True]
    assert [term.change for term in work.terms] == changes
    assert work.scale == pytest.approx(scale)
    left = operators_of(module)
    assert not left & {"relax.matmul", "relax.nn.softmax", "relax.permute_dims", "relax.add", "relax.where"}, left
    assert (work.query.row_stride, work.key.row_stride, work.output.row_stride) == (HEADS * FEATURES,) * 3


def inputs_for(model: onnx.ModelProto) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    found = {}
    for item in model.graph.input:
        shape = [dim.dim_value for dim in item.type.tensor_type.shape.dim]
        boolean = item.type.tensor_type.elem_type == TensorProto.BOOL
        drawn = rng.standard_normal(shape).astype(np.float32)
        found[item.name] = drawn < 1.0 if boolean else np.where(drawn > 0, drawn, 0) if item.name == "mask" else drawn
    return found


def outputs(model: onnx.ModelProto, inputs: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    module, params = relay.frontend.from_onnx(model)
    library = relay.build(module, "llvm", params=params, **settings)
    graph = library["default"]()
    graph.set_input(**inputs)
    graph.run()
    return graph.get_output(0).numpy(), library


def standard(mask: str, **attributes: Any) -> onnx.ModelProto:
    """ONNX's own operator, whose rows without any key are 0."""
    net = Network()
    operands = [net.input(name, 1, HEADS, rows, FEATURES) for name, rows in (("q", QUERIES), ("k", KEYS), ("v", KEYS))]
    if mask:
        operands.append(net.input("keep", QUERIES, KEYS, dtype=mask))
    model = net.model(net.op("Attention", *operands, **attributes))
    model.opset_import[0].version, model.ir_version = 24, 10
    return model


@pytest.mark.parametrize(("mask", "causal"), [("", 0), ("", 1), ("bool", 0), ("float32", 1)])
def test_the_standard_operator_is_taken(mask: str, causal: int) -> None:
    module, record = fused(imported(standard(mask, is_causal=causal)))
    (work,) = functions_of(module)
    assert record.fused
    assert (work.cleared is not None) == bool(mask)
    assert work.scale == pytest.approx(FEATURES**-0.5)


def test_rows_of_the_standard_operator_without_any_key_are_0() -> None:
    model = standard("bool")
    inputs = inputs_for(model)
    inputs["keep"][3] = False
    one, library = outputs(model, inputs, enable_persistent_fusion=True)
    apart, _ = outputs(model, inputs, enable_persistent_fusion=False)
    assert library.report.persistent.fused
    assert (one[0, :, 3] == 0).all()
    assert np.allclose(one, apart, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", ["a choice as a mask", "windows"])
def test_values_are_those_of_the_operators_apart(form: str) -> None:
    model = attention(FORMS[form][0])
    inputs = inputs_for(model)
    one, library = outputs(model, inputs, enable_persistent_fusion=True)
    apart, _ = outputs(model, inputs, enable_persistent_fusion=False)
    assert np.allclose(one, apart, rtol=1e-4, atol=1e-6)
    assert "one kernel" in str(library.report.persistent)
    kernel = library.report.operator("attention")
    assert kernel.choice.path == "rtile" and "3 x (20 queries, 24 keys, 8 features)" in kernel.choice.reason


def in_any_order(seed: int) -> Steps:
    """Two to five steps, scales before masks, behind them and between them."""
    known: list[Steps] = [
        lambda net, scores: net.op("Mul", scores, net.number(0.25)),
        lambda net, scores: net.op("Div", scores, net.number(-0.5)),
        lambda net, scores: net.op("Add", net.constant(np.linspace(-1, 1, KEYS, dtype=np.float32)), scores),
        lambda net, scores: net.op("Add", scores, net.constant(causal(-3.0))),
        lambda net, scores: net.op("Where", net.constant(causal() < 0), net.number(-2), scores),
        lambda net, scores: net.op("Where", net.constant(causal() == 0), scores, net.number(0.5)),
        chosen_once,
    ]
    rng = np.random.default_rng(seed)
    order = [known[i] for i in rng.choice(len(known), int(rng.integers(2, 6)), replace=False)]

    def steps(net: Network, scores: str) -> str:
        for step in order:
            scores = step(net, scores)
        return scores

    return steps


def chosen_once(net: Network, scores: str) -> str:
    keep = net.input("keep", 1, 1, QUERIES, KEYS, dtype="bool")
    return net.op("Add", net.op("Where", keep, net.number(0.5), net.number(-1)), scores)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
def test_steps_in_any_order_keep_their_values(seed: int) -> None:
    model = attention(in_any_order(seed))
    inputs = inputs_for(model)
    one, library = outputs(model, inputs, enable_persistent_fusion=True)
    apart, _ = outputs(model, inputs, enable_persistent_fusion=False)
    assert np.allclose(one, apart, rtol=1e-4, atol=1e-5)
    assert "one kernel" in str(library.report.persistent)


def test_the_function_computes_what_its_attribute_says() -> None:
    """Built without the attribute, from its definition, it gives the same: the twin that any other kernel has."""
    model = attention(FORMS["a choice as a mask"][0])
    module, _ = fused(imported(model))
    plain = tvm.IRModule(
        {
            gv: func.without_attr(ATTENTION) if isinstance(func, PrimFunc) else func
            for gv, func in module.functions_items()
        }
    )
    inputs = inputs_for(model)
    library = relay.build(plain, "llvm", enable_persistent_fusion=False)
    graph = library["default"]()
    graph.set_input(**inputs)
    graph.run()
    wanted, _ = outputs(model, inputs, enable_persistent_fusion=False)
    assert np.allclose(graph.get_output(0).numpy(), wanted, rtol=1e-4, atol=1e-6)


def scaled_behind_its_mask(net: Network, scores: str) -> str:
    """Twice the lowest float32 is -inf, in any order."""
    keep = net.input("keep", 1, 1, QUERIES, KEYS, dtype="bool")
    added = net.op("Add", scores, net.op("Where", keep, net.number(0), net.number(LOWEST)))
    return net.op("Mul", added, net.number(2))


def test_a_mask_that_scaling_takes_beyond_float32() -> None:
    module, _ = fused(imported(attention(scaled_behind_its_mask)))
    (work,) = functions_of(module)
    assert (work.scale, work.terms[0].no) == (2.0, -np.inf)
    kernel = construct_kernel(next(iter(kernels_of(module))), "attention", CPU, BuildOptions())
    assert from_json(KernelChoice, str(kernel.attrs[CHOICE])).path == "rtile"


def test_a_function_without_dataflow() -> None:
    """Its variables are those of any block; none may be one of a dataflow block."""
    module = relax.transform.ToNonDataflow()(imported(attention()))
    module = tvm.IRModule({gv: _unwrapped(func) for gv, func in module.functions_items()})
    found, record = fused(module)
    bound = [binding.var for block in found["main"].body.blocks for binding in block.bindings]
    assert record.fused and not [variable for variable in bound if isinstance(variable, relax.DataflowVar)]


def _unwrapped(func: Any) -> Any:
    if isinstance(func, PrimFunc):
        return func
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    body = relax.SeqExpr([relax.BindingBlock(bindings)], func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def probabilities_as_an_output() -> onnx.ModelProto:
    model = attention()
    softmax = next(node.output[0] for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(softmax, TensorProto.FLOAT, None))
    return model


def scores_as_an_output() -> onnx.ModelProto:
    model = attention()
    product = next(node.output[0] for node in model.graph.node if node.op_type == "MatMul")
    model.graph.output.append(helper.make_tensor_value_info(product, TensorProto.FLOAT, None))
    return model


REFUSALS: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "probabilities are an output": (probabilities_as_an_output, "the probabilities .* are used elsewhere, too"),
    "scores are an output": (scores_as_an_output, "the scores .* are used elsewhere, too"),
    "capped scores": (lambda: attention(lambda net, scores: net.op("Tanh", scores)), "tanh of .* lies between"),
    "scaled by a tensor": (
        lambda: attention(lambda net, scores: net.op("Mul", scores, net.input("scale", 1, HEADS, 1, 1))),
        "multiplied by no constant number",
    ),
    "another axis": (
        lambda: attention(
            lambda net, scores: net.op("Transpose", scores, perm=[0, 1, 3, 2]),
            lambda net, value: net.op("Transpose", value, perm=[0, 1, 3, 2]),
        ),
        "permute_dims of .* lies between|are read by",
    ),
    "single probabilities are dropped": (
        lambda: attention(
            behind=lambda net, value: net.op(
                "Where", net.input("dropped", 1, 1, 1, KEYS, dtype="bool"), net.number(0), value
            )
        ),
        "single probabilities of .* are replaced by 0",
    ),
    "probabilities are changed": (
        lambda: attention(behind=lambda net, value: net.op("Mul", value, net.number(0.9))),
        "are read by relax.multiply",
    ),
    "scaled by infinity": (
        lambda: attention(lambda net, scores: net.op("Mul", scores, net.number(np.inf))),
        "multiplied by no constant number",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_taken_says_why(case: str) -> None:
    build, reason = REFUSALS[case]
    before = imported(build())
    after, record = fused(before)
    (region,) = record.regions
    assert not region.fused and re.search(reason, region.reason), region.reason
    assert_structural_equal(after["main"], before["main"])


def test_a_softmax_without_products_is_nobodys_business() -> None:
    net = Network()
    module = imported(net.model(net.op("Softmax", net.input("x", 4, 8), axis=-1)))
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        assert_structural_equal(FuseAttention(CPU)(module), module)


def test_shared_heads_are_not_copied() -> None:
    """Llama's form: two heads of keys for four of queries, repeated by a broadcast between reshapes."""
    net = Network()
    sizes = net.constant(np.array([1, 2, 2, KEYS, FEATURES], np.int64))
    flat = net.constant(np.array([1, 4, KEYS, FEATURES], np.int64))

    def repeated(name: str) -> str:
        heads = net.heads(name, KEYS, (0, 2, 1, 3), heads=2)
        apart = net.op("Unsqueeze", heads, net.constant(np.array([2], np.int64)))
        return net.op("Reshape", net.op("Expand", apart, sizes), flat)

    query = net.heads("q", QUERIES, (0, 2, 1, 3), heads=4)
    scores = net.op("MatMul", query, net.op("Transpose", repeated("k"), perm=[0, 1, 3, 2]))
    module, _ = fused(imported(net.model(net.op("MatMul", net.op("Softmax", scores, axis=-1), repeated("v")))))
    (work,) = functions_of(module)
    assert work.key.batch[-1] == (2, 0) and work.key.size == KEYS * 2 * FEATURES
    assert "relax.broadcast_to" not in operators_of(module)


def test_a_constant_that_differs_by_query_is_transposed_at_build() -> None:
    module, _ = fused(imported(attention(FORMS["windows"][0])))
    (work,) = functions_of(module)
    bias, mask = (term.operand for term in work.terms)
    assert bias.row_stride == 0  # it does not differ by query
    width = QUERIES + -QUERIES % CPU.teu_lanes
    assert (mask.row_stride, mask.column_stride, mask.size) == (1, width, KEYS * width)
    assert work.staged(CPU.teu_lanes) == (False, False)


def two_layers_with_a_mask(heads: int) -> onnx.ModelProto:
    net = Network()
    mask = net.input("mask", 1, 1, KEYS, KEYS)
    query, key = net.heads("q", KEYS, (0, 2, 1, 3), heads), net.heads("k", KEYS, (0, 2, 3, 1), heads)
    value = net.heads("v", KEYS, (0, 2, 1, 3), heads)
    for _ in range(2):
        query = net.op("MatMul", net.op("Softmax", net.op("Add", net.op("MatMul", query, key), mask), axis=-1), value)
    return net.model(query)


def test_a_mask_that_many_heads_share_is_transposed_once() -> None:
    module, _ = fused(imported(two_layers_with_a_mask(8)))
    assert all(work.terms[0].operand.row_stride == 1 for work in functions_of(module))
    turned: list[Any] = []
    structural_walk(
        module["main"].body,
        (tvm.ir.Call, lambda call: turned.append(call) if operator_name(call) == "relax.permute_dims" else None),
    )
    assert len(turned) == 1
    module, _ = fused(imported(two_layers_with_a_mask(1)))
    assert all(work.terms[0].operand.column_stride == 1 for work in functions_of(module))


def test_values_with_a_mask_that_many_heads_share() -> None:
    model = two_layers_with_a_mask(8)
    inputs = inputs_for(model)
    one, _ = outputs(model, inputs)
    apart, _ = outputs(model, inputs, enable_persistent_fusion=False)
    assert np.allclose(one, apart, rtol=1e-4, atol=1e-6)


def test_switches() -> None:
    switches = {
        switch: attention_passes(CPU, BuildOptions(enable_persistent_fusion=switch)) for switch in (True, False, "auto")
    }
    assert switches[False] == [] and len(switches[True]) == len(switches["auto"]) == 2
    assert attention_passes(CPU, BuildOptions(enable_roller=False)) == []
    assert attention_passes(device_db.lookup("nvidia-a100"), BuildOptions()) == []
