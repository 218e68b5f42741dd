"""Constants: which parameters are known at compile time, and their packed copies."""

from __future__ import annotations

import numpy as np
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from tests.support.quick_target import UNOPTIMISED
from tests.support.small_modules import module_of
from tests.unit.kernels import cpu
from tvm_ext import relay
from tvm_ext._tvm import Constant, tensor
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CONSTANT_PARAMS, ConstantPack
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants, tir_calls
from tvm_ext.relay_passes.pack_constants import PackConstants
from tvm_ext.support.arrays import pack
from tvm_ext.support.shared_constants import ConstantStore, sharing
from tvm_ext.tir_passes.construct_kernels import ConstructKernels


def two_layers(second_weight_is_constant: bool, rng: np.random.Generator) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((4, 32), "float32"))
    v = relax.Var("v", relax.TensorType((32, 32), "float32"))
    first = relax.const(rng.standard_normal((32, 32)).astype("f4"))
    second = relax.const(rng.standard_normal((32, 32)).astype("f4")) if second_weight_is_constant else v
    hidden = relax.op.matmul(x, first)
    return relax.transform.LegalizeOps()(module_of([x, v], relax.op.matmul(hidden, second)))


def test_a_weight_that_is_constant_at_every_call_is_marked(rng, immutable_modules):
    module = AnnotateConstants()(two_layers(True, rng))
    assert [int(i) for i in module["matmul"].attrs[CONSTANT_PARAMS]] == [1]


def test_one_variable_call_makes_it_variable(rng, immutable_modules):
    module = AnnotateConstants()(two_layers(False, rng))
    assert CONSTANT_PARAMS not in module["matmul"].attrs


def test_packing_rewrites_every_call_and_keeps_the_result(rng):
    module = two_layers(True, rng)
    x = rng.standard_normal((4, 32)).astype("f4")
    packed = tvm.transform.Sequential([AnnotateConstants(), ConstructKernels(cpu(), BuildOptions()), PackConstants()])(
        module
    )
    calls = tir_calls(packed)
    assert [call.args[0].name_hint for call in calls] == ["matmul_packed", "matmul_packed"]
    shapes = [call.args[1].fields[1].value.shape for call in calls]
    assert all(isinstance(call.args[1].fields[1], Constant) for call in calls)
    assert all(tuple(shape) != (32, 32) for shape in shapes)
    weights = [call.args[1].fields[1].value.numpy().astype("f8") for call in tir_calls(module)]
    expected = x.astype("f8") @ weights[0] @ weights[1]
    machine = relax.VirtualMachine(tvm.compile(packed, UNOPTIMISED), tvm.cpu())
    actual = machine["main"](x, np.zeros((32, 32), "f4")).numpy()
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 1e-6


def test_builds_that_share_keep_each_constant_once() -> None:
    store, kept = ConstantStore(), []
    for _ in range(2):
        mod = two_layers(second_weight_is_constant=True, rng=np.random.default_rng(5))
        with sharing(store):
            library = relay.build(mod, "llvm", options=BuildOptions(kernel_cache="off"))
        kept.append((len(store), relay.GraphModule(library)))
    assert kept[0][0] == kept[1][0] > 0
    alone = ConstantStore()
    assert alone.shared(small := tensor(np.zeros(3, "float32"))).same_as(small)
    assert len(alone) == 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_packing_is_an_indexed_copy_with_zeros_outside(shape, data):
    array = np.arange(1, np.prod(shape) + 1, dtype="float32").reshape(shape)
    rank = data.draw(st.integers(1, 3))
    extents = tuple(data.draw(st.integers(1, 4)) for _ in range(rank))
    strides = tuple(data.draw(st.integers(-4, 6)) for _ in range(rank))
    offset = data.draw(st.integers(0, 5))
    result = pack(array, ConstantPack(param_index=0, extents=extents, strides=strides, offset=offset))
    flat = array.reshape(-1)
    for position in np.ndindex(*extents):
        source = offset + sum(i * s for i, s in zip(position, strides, strict=True))
        assert result[position] == (flat[source] if 0 <= source < flat.size else 0)
