"""The front door, running: inputs, outputs, times; and what it says to wrong input."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from tests.unit.relay.dense import X, assert_right
from tvm_ext import relay
from tvm_ext.errors import InputError


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


def test_output_is_copied_into_a_given_array(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    module.run(data=X)
    wide = np.full((4, 48), np.nan, "float32")
    out = wide[:, ::2]
    assert module.get_output(0, out=out) is out
    assert_right(out)
    for wrong in (np.empty((24, 4), "float32"), np.empty((4, 24), "float64")):
        with pytest.raises(InputError, match=r"pass out=np.empty\(\(4, 24\), 'float32'\)"):
            module.get_output(0, out=wrong)


def test_a_set_array_may_change_before_the_run(library: relay.Library) -> None:
    module = relay.GraphModule(library)
    data = X.copy()
    module.set_input("data", data)
    data[:] = np.nan
    module.run()
    assert_right(module.get_output(0).numpy())


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
