"""Which kernels are called with the graph's own tensors alone, and what those no longer look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext._tvm import IRModule, tvm_ffi
from tvm_ext.records.choice import TRUSTED_ARGUMENTS
from tvm_ext.relay_passes.trust_arguments import TrustArguments

op = relax.op


def trusted(module: IRModule) -> set[str]:
    # As the pass pipeline has it: a reshape is a view, and no kernel.
    marked = TrustArguments()(relax.transform.LegalizeOps(skip_ops=["relax.reshape"])(module))
    return {var.name_hint for var, func in marked.functions_items() if func.attrs and TRUSTED_ARGUMENTS in func.attrs}


def test_a_kernel_that_reads_an_input_is_not_marked_and_what_follows_is(immutable_modules):
    x, y = inputs_of((4, 8), (4, 8))
    assert trusted(module_of([x, y], op.exp(op.sqrt(op.add(x, y))))) == {"tir_exp", "tir_sqrt"}


def test_constants_are_the_graphs_own():
    (x,) = inputs_of((4, 8))
    assert trusted(module_of([x], op.add(op.exp(x), relax.const(np.ones((4, 8), "f4"))))) == {"add"}


def test_one_call_with_an_input_is_enough():
    (x,) = inputs_of((4, 8))
    assert trusted(module_of([x], op.exp(op.sqrt(op.exp(x))))) == {"tir_sqrt"}


@pytest.mark.parametrize(("build", "expected"), [(op.exp, {"add"}), (lambda x: x, set())], ids=["own", "input"])
def test_a_view_is_what_it_shows(build: Any, expected: set[str]):
    (x,) = inputs_of((4, 8))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            seen = builder.emit(op.reshape(builder.emit(build(x)), (32,)))
            result = builder.emit_output(op.add(seen, seen))
        builder.emit_func_output(result)
    assert trusted(builder.get()) == expected


def test_what_a_packed_function_gives_is_anybodys():
    (x,) = inputs_of((4, 8))
    given = relax.call_pure_packed("somebody.else", op.exp(x), ty_args=relax.TensorType((4, 8), "float32"))
    assert trusted(module_of([x], op.sqrt(given))) == set()


def test_functions_of_open_shapes_look_at_their_arguments():
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 8), "float32"))
    assert trusted(module_of([x], op.sqrt(op.exp(x)))) == set()


@pytest.mark.parametrize("kernel_cache", ["off", "auto"])
def test_a_strided_input_is_refused(kernel_cache: str, tmp_path, monkeypatch):
    """Nothing but the kernels that read it would notice."""
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path))
    x, y = inputs_of((4, 8), (4, 8))
    module = module_of([x, y], op.sum(op.exp(op.add(x, y)), axis=[1]))
    for _ in range(2):
        library = relay.build(module, "llvm", kernel_cache=kernel_cache)
        machine = relax.VirtualMachine(library.executable, tvm.cpu())
        good = np.ones((4, 8), "f4")
        np.testing.assert_allclose(machine["main"](good, good).numpy(), np.full(4, 8 * np.exp(2)), rtol=1e-6)
        strided = tvm_ffi.from_dlpack(np.ones((4, 16), "f4")[:, ::2], require_contiguous=False)
        with pytest.raises(ValueError, match="strides"):
            machine["main"](good, strided)
