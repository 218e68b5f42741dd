"""Every operator that a model can have becomes kernels for a GPU, or is refused by an error that says what to do.

Built as far as CUDA source: no compiler, no GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

from tests.support.operator_types.cases import cases_of, inputs_of, model_of
from tests.support.operator_types.recipes import RECIPES
from tests.support.operator_types.record import TypeCase
from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.errors import TargetError, TvmExtError
from tvm_ext.options import BuildOptions

op = relax.op
OPTIONS = BuildOptions(kernel_cache="off", check_machine_code=False)
USUAL = ("float32", "int64", "int32", "bool")
EVERYDAY = ("ScatterElements", "Compress", "GatherND")
"""What has no rProgram, in small: stock TVM's own kernels, and the fallback."""


def usual_case(operator: str) -> TypeCase:
    """The operator with types that most models have, as far as it takes them."""
    usual = [case for case in cases_of(operator) if all(kind in USUAL for _, kind in case.types)]
    floats = [case for case in usual if any(kind == "float32" for _, kind in case.types)]
    return (floats or usual or cases_of(operator))[0]


def built(operator: str) -> str:
    """CUDA source of a model of the operator alone; raises what importing and building raise."""
    case = usual_case(operator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod, params = relay.frontend.from_onnx(model_of(case, inputs_of(case)))
        return relay.build(mod, "nvidia-a100", params=params, options=OPTIONS).source()


@pytest.mark.parametrize("operator", EVERYDAY)
def test_what_has_no_rprogram_is_built(operator: str) -> None:
    assert "__global__" in built(operator)


@pytest.mark.slow
@pytest.mark.parametrize("operator", sorted(RECIPES))
def test_every_operator_is_built_or_refused(operator: str) -> None:
    try:
        built(operator)
    except TvmExtError as refusal:
        if not refusal.remedy:
            raise


def test_what_calls_the_host_is_refused_by_its_name() -> None:
    """Stock TVM sorts boxes by a function of the host: a kernel's threads would call it with the device's pointers."""
    with pytest.raises(TargetError, match=r"all_class_non_max_suppression of \[1, 3, 4\].*tvm\.contrib\.sort\.argsort"):
        built("NonMaxSuppression")


def variable(name: str, *shape: Any, dtype: str = "float32") -> relax.Var:
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def test_sorts_launch_their_own_kernels() -> None:
    """300 elements are more than a block sorts: a loop on the host launches a kernel for each length of runs."""
    x = variable("x", 5, 300)
    library = relay.build(module_of([x], op.argsort(x, axis=-1)), "nvidia-a100", options=OPTIONS)
    assert library.report.path_counts() == {"stock": 1}
    assert library.source().count('extern "C" __global__') >= 3


def test_a_part_of_no_elements_is_nobodys_work() -> None:
    x = variable("x", 4, 8)
    parts = op.split(x, [8], axis=1)
    mod = module_of([x], op.concat([op.negative(parts[1]), op.nn.relu(parts[0])], axis=1))
    assert "__global__" in relay.build(mod, "nvidia-a100", options=OPTIONS).source()


def test_a_scalar_is_copied_to_shared_memory() -> None:
    x, mask, other = variable("x", 2, 3, 3), variable("mask", 1, 3, 1, dtype="bool"), variable("other")
    mod = module_of([x, mask, other], op.sum(op.where(mask, x, other), axis=[1]))
    assert relay.build(mod, "nvidia-a100", options=OPTIONS).report.path_counts() == {"rtile": 1}


def test_a_softmax_by_stock_schedules_begins_at_minus_infinity() -> None:
    """Stock TVM reduces across threads what begins at finite numbers only: the next of its schedules is taken."""
    x = variable("x", 5, 300)
    mod = module_of([x], op.nn.softmax(x))
    library = relay.build(mod, "nvidia-a100", options=OPTIONS.updated(enable_roller=False))
    assert library.report.path_counts() == {"stock": 1}


OPEN: dict[str, Callable[..., relax.Expr]] = {
    "softmax": lambda x, i: op.nn.softmax(x),
    "softmax of columns": lambda x, i: op.nn.softmax(x, axis=0),
    "take": lambda x, i: op.take(x, i, axis=0, mode="fast"),
    "product": lambda x, i: op.matmul(x, op.permute_dims(x)),
}


@pytest.mark.parametrize("name", OPEN)
def test_dimensions_that_are_known_at_run_time_only(name: str) -> None:
    """`relay.build` refuses them; the registered pipeline has stock TVM's schedules for them."""
    x, i = variable("x", tvm.tirx.Var("n", "int64"), 16), variable("i", 3, dtype="int64")
    mod = module_of([x, i], OPEN[name](x, i))
    with pytest.raises(TvmExtError, match="have no value: 'n' of input 'x'"):
        relay.build(mod, "nvidia-a100", options=OPTIONS)
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    assert tvm.compile(mod, target=target, relax_pipeline="tvm_ext") is not None
