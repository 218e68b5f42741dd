"""Loops in sections: concatenations along the last axis have no condition left in their loops."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext._tvm import Var, tirx
from tvm_ext.tir_passes.emit.cpu_rows.sections import MOST_SECTIONS, sections


@pytest.mark.parametrize("widths", [(12, 12, 12, 12), (1, 40, 7), (3, 1), (64, 5)])
def test_concatenations(widths: tuple[int, ...]) -> None:
    draw = np.random.default_rng(len(widths))
    values = [draw.standard_normal((3, 5, width)).astype("float32") for width in widths]
    params = [relax.Var(f"x{n}", relax.TensorType(value.shape, "float32")) for n, value in enumerate(values)]
    library = relay.build(module_of(params, relax.op.concat(params, axis=-1)), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(**{f"x{n}": value for n, value in enumerate(values)})
    np.testing.assert_array_equal(module.get_output(0).numpy(), np.concatenate(values, axis=-1))


def test_a_section_that_binds_a_variable_beside_others_that_do_not() -> None:
    """Stock TVM's CommonSubexprElim binds an index behind its use inside of a Let: see `tir_pipelines`."""
    draw = np.random.default_rng(3)
    shapes = {"x": (12, 16, 1), "y": (12, 16, 5), "z": (12, 1, 6)}
    values = {name: draw.random(shape).astype("float32") for name, shape in shapes.items()}
    x, y, z = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    joined = relax.op.concat([relax.op.sqrt(x), y], axis=-1)
    library = relay.build(module_of([x, y, z], relax.op.minimum(z, joined)), "llvm", enable_rammer=False)
    module = relay.GraphModule(library)
    module.run(**values)
    wanted = np.minimum(values["z"], np.concatenate([np.sqrt(values["x"]), values["y"]], axis=-1))
    np.testing.assert_allclose(module.get_output(0).numpy(), wanted, rtol=1e-6)


def test_comparisons_are_decided() -> None:
    v, w = Var("v", "int64"), Var("w", "int64")
    a, b = (tirx.decl_buffer([tirx.IntImm("int64", 20)], "float32", name) for name in "ab")
    zero = tirx.const(0.0, "float32")
    inside = tirx.And(tirx.And(v >= tirx.IntImm("int64", 2), tirx.IntImm("int64", 6) > v), w < v)
    value = tirx.if_then_else(inside, a[v], tirx.if_then_else(v <= tirx.IntImm("int64", 7), zero, b[v]))
    parts = sections(value, v, 10)
    assert [(part.first, part.size) for part in parts] == [(0, 2), (2, 4), (6, 2), (8, 2)]
    wanted = [zero, tirx.if_then_else(w < v, a[v], zero), zero, b[v]]
    assert [str(part.value) for part in parts] == [str(item) for item in wanted]


def test_a_choice_that_leaves_a_comparison_is_cut_again() -> None:
    """A reflection of a concatenation compares an index that is the variable in some sections only."""
    v = Var("v", "int64")
    a, b = (tirx.decl_buffer([tirx.IntImm("int64", 20)], "float32", name) for name in "ab")
    number = partial(tirx.IntImm, "int64")
    mirrored = tirx.if_then_else(number(7) <= v, number(12) - v, v)
    parts = sections(tirx.if_then_else(number(2) <= mirrored, b[mirrored - number(2)], a[mirrored]), v, 9)
    assert [(part.first, part.size) for part in parts] == [(0, 2), (2, 5), (7, 2)]
    assert [str(part.value) for part in parts[:2]] == [str(a[v]), str(b[v - number(2)])]
    assert "12" in str(parts[2].value)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize(("widths", "ends"), [((2, 5), (0, 2)), ((3, 4, 9), (2, 8)), ((6, 1), (5, 6))])
def test_padded_concatenations(mode: str, widths: tuple[int, ...], ends: tuple[int, int]) -> None:
    draw = np.random.default_rng(sum(ends))
    values = {f"x{n}": draw.standard_normal((4, width)).astype("float32") for n, width in enumerate(widths)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in values.items()]
    nodes = [
        helper.make_node("Concat", list(values), ["joined"], axis=-1),
        helper.make_node("Pad", ["joined", "pads"], ["y"], mode=mode),
    ]
    pads = numpy_helper.from_array(np.array([0, ends[0], 0, ends[1]]), "pads")
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, sum(widths) + sum(ends)])
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, [output], [pads]))
    mod, params = relay.frontend.from_onnx(model)
    module = relay.GraphModule(relay.build(mod, "llvm", params=params, enable_rammer=False))
    module.run(**values)
    wanted = np.pad(np.concatenate(list(values.values()), axis=-1), ((0, 0), ends), mode)
    np.testing.assert_array_equal(module.get_output(0).numpy(), wanted)


def test_one_loop_stays_one() -> None:
    v, a = Var("v", "int64"), tirx.decl_buffer([tirx.IntImm("int64", 99)], "float32", "a")
    padded = tirx.if_then_else(v < tirx.IntImm("int64", 7), a[v], tirx.const(0.0, "float32"))
    never = tirx.if_then_else(v < tirx.IntImm("int64", 99), a[v], a[v + v])
    many = a[v]
    for place in range(1, MOST_SECTIONS + 1):
        many = tirx.if_then_else(v < tirx.IntImm("int64", place), a[v], many + a[v])
    for value in (a[v], padded, never, many):
        assert [part.size for part in sections(value, v, 40)] == [40]
