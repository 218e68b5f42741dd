"""Row kernels: rows of every length, softmax, normalisation; how divisions, buffers and forks are chosen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
from tvm import relax, te

from tests.unit.kernels import constructed, cpu, from_te, legalised, relative_error, run
from tvm_ext._tvm import tirx
from tvm_ext.analysis.computations import read_operator
from tvm_ext.cost.row_time import RowClock
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import STACK_BYTES, new_buffer
from tvm_ext.records.tuning import RowTiles
from tvm_ext.tir_passes.expressions.vector_math import has_scale

op = relax.op
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 49, 63, 64, 65, 100, 127, 1000]  # around 16 lanes and 4 registers of them


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def built_script(build, *shapes, dtype="float32"):
    return constructed(legalised(build, *shapes, dtype=dtype))[0].script()


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod"])
def test_rows_of_any_length_are_reduced(name, length, rng):
    x = rng.uniform(0.5, 1.5, (13, length)).astype("f4")
    func = legalised(lambda v: getattr(op, name)(v, axis=[1]), x.shape)
    kernel, choice = constructed(func)
    expected = getattr(x.astype("f8"), name)(1)
    assert relative_error(run(kernel, choice, [x], (13,), "float32"), expected) < 4e-6


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("length", LENGTHS)
def test_half_precision_rows_are_summed_in_float32(length, rng):
    x = rng.uniform(0.5, 1.5, (5, length)).astype("f2")
    kernel, choice = constructed(legalised(lambda v: op.sum(v, axis=[1]), x.shape, dtype="float16"))
    actual = run(kernel, choice, [x], (5,), "float16")
    assert relative_error(actual, x.astype("f8").sum(1)) < 2**-10


@pytest.mark.sampled
@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("shape", [(5, 7, 33), (3, 16, 16), (1, 49, 3)])
def test_leading_middle_and_last_axes(shape, axes, rng):
    x = rng.standard_normal(shape).astype("f4")
    kernel, choice = constructed(legalised(lambda v: op.max(v, axis=axes, keepdims=True), shape))
    expected = x.astype("f8").max(tuple(axes), keepdims=True)
    assert relative_error(run(kernel, choice, [x], expected.shape, "float32"), expected) == 0


# --- softmax -------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("length", [*LENGTHS, 5003])
@pytest.mark.parametrize("log", [False, True])
def test_softmax_of_any_length(length, log, rng):
    x = (20 * rng.standard_normal((3, length))).astype("f4")
    kernel, choice = constructed(legalised(op.nn.log_softmax if log else op.nn.softmax, x.shape))
    wide = x.astype("f8")
    shifted = wide - wide.max(1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(1, keepdims=True)) if log else softmax(wide)
    assert np.abs(run(kernel, choice, [x], x.shape, "float32") - expected).max() < (2e-5 if log else 1e-6)


@pytest.mark.sampled(every=13)
@pytest.mark.parametrize("rows", [(12, 16), (7, 9), (5, 7), (1, 2)])  # turns of four, three, one and two rows
@pytest.mark.parametrize("length", [4, 5, 13, 16, 20, 49, 79])
@pytest.mark.parametrize("log", [False, True])
def test_short_rows_take_turns(rows, length, log, rng):
    x = (5 * rng.standard_normal((*rows, length))).astype("f4")
    kernel, choice = constructed(legalised(op.nn.log_softmax if log else op.nn.softmax, x.shape))
    expected = softmax(x.astype("f8"))
    expected = np.log(expected) if log else expected
    assert np.abs(run(kernel, choice, [x], x.shape, "float32") - expected).max() < (2e-5 if log else 1e-6)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_softmax_of_masked_rows(dtype, rng):
    x = rng.standard_normal((4, 50)).astype(dtype)
    x[1, ::2] = -np.inf
    x[2] = np.nan
    x[3] = 60000.0
    kernel, choice = constructed(legalised(op.nn.softmax, x.shape, dtype=dtype))
    actual = run(kernel, choice, [x], x.shape, dtype)
    expected = softmax(x.astype("f8"))
    # x minus the largest is rounded in its own type: a float16 between -8 and -4 by up to 2^-9, and e^x by as much.
    np.testing.assert_allclose(actual, expected, rtol=3e-6 if dtype == "float32" else 4e-3, atol=1e-7)
    assert np.all(actual[1, ::2] == 0)


def test_rows_of_less_than_a_register_are_reduced_in_a_part_of_one():
    text = constructed(legalised(op.nn.softmax, (7, 13)), device=device_db.lookup("cpu-epyc-zen5"))[0].script()
    assert "T.vectorized(T.int64(8))" in text
    assert "for k in" not in text


def test_softmax_keeps_its_exponentials_in_the_output_and_divides_once_per_row():
    """Neither a row of exponentials beside the result, nor a division in the loop over elements."""
    lines = built_script(op.nn.softmax, (12, 200)).splitlines()
    assert not any("exp_row = " in line for line in lines)
    scaled = [line for line in lines if "T.float32(1.0) /" in line]
    assert len(scaled) == 1
    assert sum("maxelem_row[T.int64(0)] = " in line for line in lines) == 1


def test_the_exponentials_are_summed_as_they_are_written():
    """One loop stores exp(x - m) and adds it up: between the two there is no other loop."""
    lines = built_script(op.nn.softmax, (12, 256)).splitlines()
    exponent = "ldexp" if has_scale(cpu()) else "T.reinterpret"
    written = next(i for i, line in enumerate(lines) if "T_softmax_norm[" in line and exponent in line)
    assert "partial" in lines[written + 1]
    assert "T_softmax_norm[" in lines[written + 1]


def test_a_quotient_by_what_may_be_tiny_stays_a_quotient(rng):
    """1 / 1e-39 is inf in float32, though 1e-39 / 1e-39 is 1."""

    x, k = te.placeholder((4, 64), "float32", "x"), te.reduce_axis((0, 64), "k")
    total = te.compute((4,), lambda i: te.sum(x[i, k], axis=k), "total")
    kernel, _ = constructed(from_te(x, te.compute((4, 64), lambda i, j: x[i, j] / total[i], "y")))
    assert "T.float32(1.0) /" not in kernel.script()
    x, s = te.placeholder((4, 32), "float32", "x"), te.placeholder((4,), "float32", "s")
    func = from_te(x, s, te.compute((4, 32), lambda i, j: x[i, j] / tirx.sqrt(s[i]), "y"))
    kernel, choice = constructed(func)
    tiny = np.full((4, 32), 1e-30, "f4")
    actual = run(kernel, choice, [tiny, np.zeros(4, "f4") + np.float32(1e-44)], (4, 32), "float32")
    np.testing.assert_allclose(actual, tiny / np.sqrt(np.float32(1e-44)), rtol=1e-6)


def test_a_root_of_something_plus_epsilon_is_inverted_once_per_row(rng):
    x, s = te.placeholder((40, 96), "float32", "x"), te.placeholder((40,), "float32", "s")
    y = te.compute((40, 96), lambda i, j: x[i, j] / tirx.sqrt(s[i] + tirx.const(1e-12, "float32")), "y")
    kernel, choice = constructed(from_te(x, s, y))
    assert "T.float32(1.0) /" in kernel.script()
    a, b = rng.standard_normal((40, 96)).astype("f4"), rng.uniform(0, 2, 40).astype("f4")
    b[3] = 0  # the smallest root there can be
    expected = a.astype("f8") / np.sqrt(b.astype("f8") + 1e-12)[:, None]
    assert relative_error(run(kernel, choice, [a, b], (40, 96), "float32"), expected) < 1e-6


# --- normalisation -------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=9)
@pytest.mark.parametrize(("length", "offset"), [*((n, 0) for n in LENGTHS), *((n, 300) for n in LENGTHS if n > 2)])
def test_layer_norm_of_any_length(length, offset, rng):
    x = (rng.standard_normal((6, length)) + offset).astype("f4")
    gain, bias = rng.standard_normal(length).astype("f4"), rng.standard_normal(length).astype("f4")
    kernel, choice = constructed(
        legalised(lambda v, g, b: op.nn.layer_norm(v, g, b, axes=-1), x.shape, gain.shape, bias.shape)
    )
    wide = x.astype("f8")
    centred = wide - wide.mean(1, keepdims=True)
    expected = centred / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * gain + bias
    # The mean's rounding, 2^-24 of 300, is 2e-5 of a deviation of 1.
    tolerance = 4e-6 if offset == 0 else 2e-4
    assert relative_error(run(kernel, choice, [x, gain, bias], x.shape, "float32"), expected) < tolerance


@pytest.mark.parametrize("shape", [(4, 32, 7, 7), (2, 3, 1, 1), (1, 5, 17, 3)])
def test_variance_over_the_image(shape, rng):
    x = (rng.standard_normal(shape) + 50).astype("f4")
    kernel, choice = constructed(legalised(lambda v: op.variance(v, axis=[2, 3]), shape))
    expected = x.astype("f8").var((2, 3))
    actual = run(kernel, choice, [x], expected.shape, "float32")
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


# --- buffers and forks ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("elements", "scope"), [(1, "global"), (255, "global"), (256, "local"), (4096, "local")])
def test_small_local_buffers_go_where_stock_tvm_keeps_them_on_the_stack(elements, scope):
    assert 255 * 4 < STACK_BYTES == 256 * 4
    assert str(new_buffer((elements,), "float32", "b", "local").ty.storage_scope) == scope


def test_a_row_kernel_allocates_nothing_from_the_workspace():
    kernel, _ = constructed(legalised(op.nn.softmax, (64, 128)))
    target = device_db.device_for_target("llvm")[1]
    library = tvm.compile(kernel.with_attr("global_symbol", "main"), target=target)
    assert "TVMBackendAllocWorkspace" not in library.mod.inspect_source("asm")


def two_units(**fields) -> DeviceSpec:
    return dataclasses.replace(cpu(), unit_count=2, launch_overhead_us=1.0, **fields)


@pytest.mark.parametrize(("rows", "parallel"), [(64, False), (65536, True)])
def test_a_fork_only_where_it_pays_on_warm_data(rows, parallel):
    kernel, _ = constructed(legalised(lambda v: op.mean(v, axis=[1]), (rows, 49)), device=two_units())
    assert ("T.parallel" in kernel.script()) == parallel


def test_row_time_reads_from_the_cache_that_holds_the_tensors():
    device = two_units()
    times = {}
    for rows in (512, 1024, 1 << 20):
        computations = read_operator(legalised(lambda v: op.nn.relu(v), (rows, 64)), "relu").computations
        times[rows] = RowClock(computations, device).predict(RowTiles(forks=True, registers=4)).busy_s / (
            2 * rows * 64 * 4
        )
    rate = {layer.name: layer.bandwidth_gb_per_s * 1e9 for layer in device.layers[1:]}
    lowest = device.lowest_layer.name
    assert times[512] == pytest.approx(1 / rate["L2"])
    assert times[1024] == pytest.approx(1 / rate["L2"])
    assert times[1 << 20] == pytest.approx(1 / rate[lowest])
