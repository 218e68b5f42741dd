"""The front door, building: parameters, names, shapes, options and targets."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tests.unit.relay.dense import B, W, X, assert_right, dense_model
from tvm_ext import relay
from tvm_ext.errors import InputError, OptionError, TargetError


def test_names_of_the_file_are_accepted() -> None:
    mod, params = relay.frontend.from_onnx(dense_model(name="gpu_0/data:0"))
    module = relay.GraphModule(relay.build(mod, params=params))
    module.run(**{"gpu_0/data:0": X})
    assert_right(module.get_output(0).numpy())
    assert module.inputs[0].original_name == "gpu_0/data:0"


def test_what_branches_begin_with_alike_is_computed_once() -> None:
    x = relax.Var("x", relax.TensorType((1, 8, 9, 9), "float32"))
    halves = [relax.op.nn.max_pool2d(relax.op.nn.relu(x), (3, 3), (stride, stride), (1, 1)) for stride in (1, 1, 2)]
    mod = module_of([x], relax.op.add(relax.op.add(halves[0], halves[1]), relax.op.mean(halves[2])))
    found: list[str] = []
    for block in relay.prepare(mod, {})["main"].body.blocks:
        found += [str(binding.value.op.name) for binding in block.bindings if isinstance(binding.value, relax.Call)]
    assert (found.count("relax.nn.relu"), found.count("relax.nn.max_pool2d")) == (1, 2)


def test_parameters_may_be_numpy_arrays() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    module = relay.GraphModule(relay.build(mod, params={name: value.numpy() for name, value in params.items()}))
    module.run(data=X)
    assert_right(module.get_output(0).numpy())


def test_parameters_left_out_become_inputs() -> None:
    mod, _ = relay.frontend.from_onnx(dense_model())
    module = relay.GraphModule(relay.build(mod))
    module.run(data=X, w=W, b=B)
    assert_right(module.get_output(0).numpy())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", W, r"no input called 'weight'"),
        ("w", W.T.copy(), "parameter 'w' should be w: 32x24 float32, but is w: 24x32 float32"),
        ("w", W.astype("float16"), "float16"),
    ],
)
def test_wrong_parameters(name: str, value: np.ndarray, message: str) -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    with pytest.raises(InputError, match=message):
        relay.build(mod, params={**params, name: value})


def test_an_open_dimension_is_named_and_can_be_bound() -> None:
    mod, params = relay.frontend.from_onnx(dense_model(batch="batch"))
    with pytest.raises(InputError, match=r"(?s)'batch'.*'data'.*--shape data="):
        relay.build(mod, params=params)
    mod, params = relay.frontend.from_onnx(dense_model(batch="batch"), shape={"data": (4, 32)})
    module = relay.GraphModule(relay.build(mod, params=params))
    module.run(data=X)
    assert_right(module.get_output(0).numpy())


def test_the_module_is_never_modified() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    before = mod.clone()
    relay.build(mod, params=params)
    tvm.ir.assert_structural_equal(mod, before)


def test_a_users_instruments_keep_their_state() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    timing = tvm.ir.instrument.PassTimingInstrument()
    with tvm.transform.PassContext(instruments=[timing]):
        library = relay.build(mod, params=params)
        assert "FuseOps" in timing.render()
    assert library.report.passes == ()


def test_function_instead_of_module_and_no_main() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    assert relay.build(mod["main"], params=params).inputs[0].name == "data"
    with pytest.raises(InputError, match="no function 'main'"):
        relay.build(tvm.IRModule({"other": mod["main"]}))


def test_without_roller_every_operator_says_so() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    library = relay.build(mod, params=params, enable_roller=False)
    assert set(library.report.path_counts()) == {"stock"}
    assert all("enable_roller=False" in operator.choice.reason for operator in library.report.operators)
    module = relay.GraphModule(library)
    module.run(data=X)
    assert_right(module.get_output(0).numpy())


def test_with_roller_the_matrix_product_is_constructed(library: relay.Library) -> None:
    assert library.report.path_counts() == {"rtile": 1}
    operator = library.report.operators[0]
    assert operator.choice.program is not None
    assert operator.predicted_s is not None
    assert operator.choice.flops >= 2 * 4 * 32 * 24


def test_unknown_options_and_targets() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    with pytest.raises(OptionError, match="candidates"):
        relay.build(mod, params=params, candidate=3)
    with pytest.raises(TargetError, match="nvidia-h200"):
        relay.build(mod, "nvidia-h20", params=params)


@pytest.mark.parametrize("target", ["cuda", "opencl", "nvidia-h200"])
def test_a_gpu_that_is_not_here_is_built_for(target: str) -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    library = relay.build(mod, target, params=params)
    assert library.report.path_counts() == {"rtile": len(library.report.operators)}
    assert all(operator.choice.gpu for operator in library.report.operators)
    assert "no kernel constructed" not in library.report.table()


def test_tuple_scalar_and_empty_outputs() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((0, 3), "float32"))
    y = relax.Var("y", relax.TensorType((), "float32"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            outputs = [builder.emit_output(relax.op.add(value, value)) for value in (x, y)]
        builder.emit_func_output(relax.Tuple(outputs))
    module = relay.GraphModule(relay.build(builder.finalize()))
    module.run(x=np.zeros((0, 3), "float32"), y=np.float32(1.5))
    assert module.get_num_outputs() == 2
    assert module.get_output(0).shape == (0, 3)
    assert float(module.get_output(1).numpy()) == 3.0


def test_stock_compile_takes_the_registered_pipeline() -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    bound = relay.prepare(mod, params)
    executable = tvm.compile(bound, tvm.target.Target("llvm"), relax_pipeline="tvm_ext", tir_pipeline="tvm_ext")
    assert_right(relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(X)).numpy())
