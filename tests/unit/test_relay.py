"""The front door: import, build, run, export, reload; and what it says to wrong input."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from tvm_ext import relay
from tvm_ext.errors import ExportError, InputError, OptionError, TargetError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 32)).astype("float32")
W = RNG.standard_normal((32, 24)).astype("float32")
B = RNG.standard_normal(24).astype("float32")
EXPECTED = np.maximum(X.astype("float64") @ W.astype("float64") + B.astype("float64"), 0)


def dense_model(batch: int | str = 4, name: str = "data") -> onnx.ModelProto:
    """relu(data @ w + b)."""
    nodes = [
        helper.make_node("MatMul", [name, "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["result"]),
    ]
    graph = helper.make_graph(
        nodes,
        "dense",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 32])],
        [helper.make_tensor_value_info("result", TensorProto.FLOAT, [batch, 24])],
        [numpy_helper.from_array(W, "w"), numpy_helper.from_array(B, "b")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def library() -> relay.Library:
    mod, params = relay.frontend.from_onnx(dense_model())
    return relay.build(mod, "llvm", params=params)


def assert_right(actual: np.ndarray, expected: np.ndarray = EXPECTED) -> None:
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


# --- running ----------------------------------------------------------------------------------------------------------
def test_old_relay_code_runs(library: relay.Library) -> None:
    device = tvm.cpu()
    module = relay.graph_executor.GraphModule(library["default"](device))
    module.set_input("data", X)
    module.run()
    assert module.get_num_inputs() == module.get_num_outputs() == 1
    assert_right(module.get_output(0).numpy())
    assert module.get_input_info() == ({"data": (4, 32)}, {"data": "float32"})


@pytest.mark.parametrize("how", ["index", "keyword", "run", "tensor", "list", "dlpack"])
def test_ways_to_set_an_input(library: relay.Library, how: str) -> None:
    module = relay.GraphModule(library, tvm.cpu())
    if how == "run":
        module.run(data=X)
    else:
        value = {"tensor": tvm.runtime.tensor(X), "list": X.tolist(), "dlpack": tvm.runtime.tensor(X)}.get(how, X)
        module.set_input(0, value) if how != "keyword" else module.set_input(data=value)
        module.run()
    assert_right(module.get_output(0).numpy())
    np.testing.assert_array_equal(module.get_input("data").numpy(), X)


def test_input_that_is_not_contiguous(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    module.run(data=np.asfortranarray(X))
    assert_right(module.get_output().numpy())


def test_nan_flows_through(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    module.run(data=np.full((4, 32), np.nan, "float32"))
    assert module.get_output(0).shape == (4, 24)


def test_output_is_copied_into_a_given_tensor(library: relay.Library) -> None:
    out = tvm.runtime.tensor(np.full((4, 24), np.nan, "float32"))
    module = relay.GraphModule(library)
    module.run(data=X)
    module.get_output(0, out)
    assert_right(out.numpy())


def test_outputs_of_two_runs_do_not_share_memory(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    module.run(data=X)
    first = module.get_output(0)
    module.run(data=np.zeros_like(X))
    assert_right(first.numpy())


def test_two_modules_over_one_library_have_their_own_inputs(library: relay.Library) -> None:
    first, second = relay.GraphModule(library), relay.GraphModule(library)
    first.set_input("data", X)
    assert first.has_input("data")
    assert not second.has_input("data")


def test_benchmark_returns_a_time_per_repeat(library: relay.Library) -> None:
    result = relay.GraphModule(library).benchmark(tvm.cpu(), number=2, repeat=3, data=X)
    assert len(result.results) == 3
    assert min(result.results) > 0


def test_plain_virtual_machine(library: relay.Library) -> None:
    assert_right(library.vm(tvm.cpu())["main"](tvm.runtime.tensor(X)).numpy())


def test_profile_measures_every_kernel(library: relay.Library) -> None:
    report = library.profile({"data": X}, repeat=2)
    assert report is library.report
    assert all(operator.measured_s is not None and operator.measured_s > 0 for operator in report.operators)
    assert report.run_s is not None
    assert report.run_s > 0


# --- wrong input at run time ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dta", X, r"no input called 'dta'.*\n.*did you mean 'data'"),
        (3, X, "there is no input 3"),
        ("data", X[:3], "expects 4x32 float32, but was given 3x32 float32"),
        ("data", X.astype("float64"), r'given 4x32 float64.\n.*astype\("float32"\)'),
        ("data", X[0], "given 32 float32"),
        ("data", "text", "cannot be made a tensor"),
    ],
)
def test_wrong_inputs_are_named(library: relay.Library, name: str | int, value: object, message: str) -> None:
    module = relay.GraphModule(library)
    with pytest.raises(InputError, match=message):
        module.set_input(name, value)


def test_a_refused_call_changes_nothing(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    with pytest.raises(InputError):
        module.set_input(data=X, other=X)
    assert not module.has_input("data")


def test_running_without_inputs_names_them(library: relay.Library) -> None:
    with pytest.raises(InputError, match="data: 4x32 float32"):
        relay.GraphModule(library).run()


def test_output_before_run_and_out_of_range(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    with pytest.raises(InputError, match="no outputs yet"):
        module.get_output(0)
    module.run(data=X)
    with pytest.raises(InputError, match="no output 1"):
        module.get_output(1)


def test_unknown_entry_of_the_library(library: relay.Library) -> None:
    with pytest.raises(InputError, match="no entry 'main2'"):
        library["main2"]


# --- building ---------------------------------------------------------------------------------------------------------
def test_names_of_the_file_are_accepted() -> None:
    mod, params = relay.frontend.from_onnx(dense_model(name="gpu_0/data:0"))
    module = relay.GraphModule(relay.build(mod, params=params))
    module.run(**{"gpu_0/data:0": X})
    assert_right(module.get_output(0).numpy())
    assert module.inputs[0].original_name == "gpu_0/data:0"


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


# --- exporting --------------------------------------------------------------------------------------------------------
RunPython = Callable[..., subprocess.CompletedProcess[str]]


def test_reload_in_another_process(library: relay.Library, tmp_path: Path, run_python: RunPython) -> None:
    library.export_library(tmp_path / "dense.so")
    np.save(tmp_path / "x.npy", X)
    result = run_python(
        dedent(f"""
        import numpy as np
        from tvm_ext import relay
        library = relay.load({str(tmp_path / "dense.so")!r})
        module = relay.GraphModule(library)
        module.run(data=np.load({str(tmp_path / "x.npy")!r}))
        np.save({str(tmp_path / "y.npy")!r}, module.get_output(0).numpy())
        open({str(tmp_path / "report.json")!r}, "w").write(library.report.to_json())
    """)
    )
    assert result.returncode == 0, result.stderr
    assert "Scope" not in result.stderr
    assert_right(np.load(tmp_path / "y.npy"))
    assert (tmp_path / "report.json").read_text() == library.report.to_json()


def test_reload_with_tvm_alone(library: relay.Library, tmp_path: Path, run_python: RunPython) -> None:
    library.export_library(tmp_path / "dense.so")
    np.save(tmp_path / "x.npy", X)
    result = run_python(
        dedent(f"""
        import numpy as np, sys, tvm
        from tvm.runtime.vm import VirtualMachine
        vm = VirtualMachine(tvm.runtime.load_module({str(tmp_path / "dense.so")!r}), tvm.cpu())
        np.save({str(tmp_path / "y.npy")!r}, vm["main"](np.load({str(tmp_path / "x.npy")!r})).numpy())
        assert "tvm_ext.relay" not in sys.modules
        """),
        TVM_USE_RUNTIME_LIB="1",
    )
    assert result.returncode == 0, result.stderr
    assert_right(np.load(tmp_path / "y.npy"))


def test_export_again_after_loading(library: relay.Library, tmp_path: Path) -> None:
    library.export_library(tmp_path / "first.so")
    relay.load(tmp_path / "first.so").export_library(tmp_path / "second.so")
    assert (tmp_path / "first.so").read_bytes() == (tmp_path / "second.so").read_bytes()
    module = relay.GraphModule(tvm.runtime.load_module(str(tmp_path / "second.so")), tvm.cpu())
    module.run(data=X)
    assert_right(module.get_output(0).numpy())


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    library: relay.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dense.so").write_bytes(b"the old one")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match=r"(?s)No space left.*free some space"):
        library.export_library(tmp_path / "dense.so")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"dense.so": b"the old one"}


def test_a_linker_that_cannot_write_leaves_nothing(tmp_path: Path, run_python: RunPython) -> None:
    """A real limit on file sizes, which the compiler inherits: 20 KB are not enough for a library."""
    result = run_python(
        dedent(f"""
        import resource
        from tvm_ext import relay
        from tvm_ext.errors import ExportError
        from tvm_ext.bench.models import build_model
        mod, params = relay.frontend.from_onnx(build_model("mlp"))
        library = relay.build(mod, params=params)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            library.export_library({str(tmp_path / "mlp.so")!r})
        except ExportError as error:
            print("refused:", error.problem[:40])
    """)
    )
    assert result.stdout.startswith("refused:"), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "report.json").write_text("the old one")
    result = run_python(
        dedent(f"""
        import os, signal
        from tvm_ext.support.files import produce_atomically
        def half(path):
            path.write_bytes(b"half of the new")
            os.kill(os.getpid(), signal.SIGKILL)
        produce_atomically({str(tmp_path / "report.json")!r}, half)
    """)
    )
    assert result.returncode == -9
    assert (tmp_path / "report.json").read_text() == "the old one"


@pytest.mark.parametrize(("name", "message"), [("no/such/folder/a.so", "cannot write into"), ("a.txt", "call it a.so")])
def test_places_that_cannot_be_written(library: relay.Library, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        library.export_library(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_the_mode_is_that_of_any_new_file(library: relay.Library, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    library.export_library(tmp_path / "dense.so")
    modes = [(tmp_path / name).stat().st_mode & 0o666 for name in ("dense.so", "plain")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_files_that_are_no_library(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "bad.so").write_bytes(content)
    with pytest.raises(ExportError, match=r"no file|cannot be loaded"):
        relay.load(tmp_path / "bad.so")


@pytest.mark.parametrize("share", [0.2, 0.6, 0.999])
def test_a_library_that_was_cut_off(library: relay.Library, tmp_path: Path, share: float) -> None:
    """Loading one would end the process with a bus error."""
    library.export_library(tmp_path / "dense.so")
    content = (tmp_path / "dense.so").read_bytes()
    (tmp_path / "dense.so").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ExportError, match="cut off"):
        relay.load(tmp_path / "dense.so")


def test_a_library_of_stock_tvm_is_refused(tmp_path: Path) -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    tvm.compile(relay.prepare(mod, params), "llvm").export_library(str(tmp_path / "stock.so"))
    with pytest.raises(ExportError, match="not exported by tvm_ext"):
        relay.load(tmp_path / "stock.so")
