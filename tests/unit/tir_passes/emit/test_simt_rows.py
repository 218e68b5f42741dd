"""Row kernels for GPUs: values and accesses in the SIMT interpreter, values through OpenCL, registers by ptxas."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, te, topi

from tests.support import opencl_cpu
from tests.unit.kernels import from_te, legalised, relative_error
from tests.unit.row_kernels import check, interpreted, launch_count, row_kernel
from tvm_ext._tvm import Target, tirx, tvm
from tvm_ext.errors import IllegalRewrite, UnsupportedEnvironmentError
from tvm_ext.toolchains.cuda_toolchain import compile_cuda, find_nvcc

op = relax.op
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LENGTHS = [1, 2, 3, 7, 8, 33, 49, 100, 768, 1001]


def normal(rng, shape, dtype="float32"):
    return rng.standard_normal(shape).astype(NUMPY[dtype])


def wide(array):
    return array.astype("f8")


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x, gamma, beta):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma + beta


# --- element by element ---------------------------------------------------------------------------------------------
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1001), (64, 64, 4), (5, 7, 11)])
def test_element_wise_of_any_size(shape, dtype, rng):
    x = normal(rng, shape, dtype)
    counters, kernel = check(legalised(op.nn.relu, shape, dtype=dtype), [x], np.maximum(wide(x), 0))
    assert launch_count(kernel) == 1
    assert counters.sector_efficiency() == 1.0 or math.prod(shape) % 8


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bias_and_activation_are_one_launch_of_vectors(dtype, rng):
    x, bias = normal(rng, (64, 128), dtype), normal(rng, (128,), dtype)
    func = legalised(lambda a, b: op.nn.relu(op.add(a, b)), x.shape, bias.shape, dtype=dtype)
    counters, kernel = check(func, [x, bias], np.maximum(wide(x) + wide(bias), 0))
    assert launch_count(kernel) == 1
    assert counters.sector_efficiency() == 1.0


def test_a_bias_of_each_channel_is_not_taken_for_a_transposition(rng):
    x, bias = normal(rng, (4, 60, 7, 7)), normal(rng, (60, 1, 1))
    _, kernel = check(legalised(op.add, x.shape, bias.shape), [x, bias], wide(x) + wide(bias))
    assert kernel.shared_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gelu_is_computed_in_float32(dtype, rng):
    x = normal(rng, (33, 64), dtype)
    expected = wide(x) * 0.5 * (1 + np.vectorize(math.erf)(wide(x) / math.sqrt(2)))
    check(legalised(op.nn.gelu, x.shape, dtype=dtype), [x], expected)


@pytest.mark.parametrize(("first", "second"), [(8, 16), (5, 6)])
@pytest.mark.parametrize("axis", [1, 2])
def test_concatenation(first, second, axis, rng):
    shapes = [[2, 24, 24], [2, 24, 24]]
    shapes[0][axis], shapes[1][axis] = first, second
    x, y = normal(rng, shapes[0]), normal(rng, shapes[1])
    func = legalised(lambda a, b: op.concat([a, b], axis=axis), tuple(x.shape), tuple(y.shape))
    counters, _ = check(func, [x, y], np.concatenate([wide(x), wide(y)], axis))
    if axis == 2 and first == 8:
        assert counters.sector_efficiency() == 1.0  # each vector comes from one of the two inputs


def test_embedding_rows_are_read_in_vectors(rng):
    table, ids = te.placeholder((50, 64), "float32", "w"), te.placeholder((9,), "int32", "ids")
    func = from_te(table, ids, te.compute((9, 64), lambda i, j: table[ids[i], j], "y"))
    w, numbers = normal(rng, (50, 64)), rng.integers(0, 50, 9, dtype="int32")
    counters, _ = check(func, [w, numbers], wide(w)[numbers])
    assert counters.sector_efficiency() > 0.8  # an index is one element of a sector


# --- transposition --------------------------------------------------------------------------------------------------
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((128, 64), (1, 0)), ((2, 33, 65), (0, 2, 1)), ((2, 24, 10, 24), (0, 2, 3, 1)), ((3, 5), (1, 0))],
)
def test_transposition(shape, axes, dtype, rng):
    x = normal(rng, shape, dtype)
    func = legalised(lambda v: op.permute_dims(v, axes), shape, dtype=dtype)
    counters, kernel = check(func, [x], wide(x).transpose(axes))
    if shape == (128, 64):
        assert counters.sector_efficiency() == 1.0
        assert kernel.shared_bytes > 0


def test_tiles_of_a_device_with_small_blocks(rng):
    x = normal(rng, (128, 64), "float16")
    func = legalised(lambda v: op.permute_dims(v, [1, 0]), x.shape, dtype="float16")
    _, kernel = check(func, [x], wide(x).T, device="amd-mi50")
    assert kernel.threads <= 256


# --- reductions -----------------------------------------------------------------------------------------------------
@pytest.mark.sampled
@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("shape", [(5, 7, 33), (1, 49, 3), (70, 16, 64)])
def test_reductions_over_any_axes(shape, axes, rng):
    x = normal(rng, shape)
    func = legalised(lambda v: op.mean(v, axis=axes), shape)
    check(func, [x], wide(x).mean(tuple(axes)))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_any_length_are_reduced(name, length, rng):
    x = rng.uniform(0.99, 1.01, (13, length)).astype("f4")
    func = legalised(lambda v: getattr(op, name)(v, axis=[1]), x.shape)
    check(func, [x], getattr(wide(x), name)(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(dtype, rng):
    x = rng.uniform(0.5, 1.5, (3, 5000)).astype(NUMPY[dtype])
    check(legalised(lambda v: op.sum(v, axis=[1]), x.shape, dtype=dtype), [x], wide(x).sum(1))


def test_integers_are_reduced_exactly(rng):
    x = rng.integers(-1000, 1000, (6, 300), dtype="int32")
    check(legalised(lambda v: op.sum(v, axis=[1]), x.shape, dtype="int32"), [x], x.sum(1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_leading_axis_is_reduced_in_coalesced_vectors(dtype, rng):
    x = normal(rng, (300, 64), dtype)
    counters, _ = check(legalised(lambda v: op.mean(v, axis=[0]), x.shape, dtype=dtype), [x], wide(x).mean(0))
    assert counters.sector_efficiency() == 1.0


def test_few_long_rows_take_two_launches_with_equal_results_every_time(rng):
    x = normal(rng, (1000, 1003))
    func = legalised(op.sum, x.shape)
    first, _, kernel = interpreted(func, [x])
    second, _, _ = interpreted(func, [x])
    assert launch_count(kernel) == 2
    assert first == second
    assert relative_error(first, wide(x).sum()) < 1e-5


def test_what_follows_a_divided_reduction_is_in_its_second_launch(rng):
    x = normal(rng, (6000, 64))
    _, kernel = check(legalised(lambda v: op.mean(v, axis=[0]), x.shape), [x], wide(x).mean(0))
    assert launch_count(kernel) == 2


def test_an_initial_value_counts_once(rng):
    x, k = te.placeholder((5, 40), "float32", "x"), te.reduce_axis((0, 40), "k")
    seven = te.comm_reducer(lambda a, b: a + b, lambda dtype: tirx.const(7.0, dtype))
    value = normal(rng, (5, 40))
    check(from_te(x, te.compute((5,), lambda i: seven(x[i, k], axis=k), "y")), [value], wide(value).sum(1) + 7)


# --- softmax and normalisation --------------------------------------------------------------------------------------
@pytest.mark.sampled
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_softmax_of_any_length(length, log, rng):
    x = 5 * normal(rng, (11, length))
    expected = np.log(softmax(wide(x))) if log else softmax(wide(x))
    _, kernel = check(legalised(op.nn.log_softmax if log else op.nn.softmax, x.shape), [x], expected)
    assert launch_count(kernel) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("axis", [1, -1])
def test_softmax_reads_its_input_once(axis, dtype, rng):
    x = normal(rng, (2, 16, 8, 64), dtype)
    counters, kernel = check(
        legalised(lambda v: op.nn.softmax(v, axis=axis), x.shape, dtype=dtype), [x], softmax(wide(x), axis)
    )
    assert launch_count(kernel) == 1
    assert "held in registers" in kernel.notes[0]
    assert counters.sector_efficiency() == 1.0
    assert counters.total("useful_bytes", scope="global", store=False) == x.nbytes


def test_a_row_too_long_for_registers_is_read_in_every_pass(rng):
    x = normal(rng, (2, 40000))
    _, kernel = check(legalised(op.nn.softmax, x.shape), [x], softmax(wide(x)))
    assert "held" not in kernel.notes[0]


def test_softmax_of_few_huge_rows_is_divided_among_blocks(rng):
    x = normal(rng, (2, 300001))
    _, kernel = check(legalised(op.nn.softmax, x.shape), [x], softmax(wide(x)))
    assert launch_count(kernel) > 1
    assert "parts" in kernel.notes[0]


def test_masked_rows_of_softmax(rng):
    x = normal(rng, (6, 50))
    x[1, ::2] = -np.inf
    check(legalised(op.nn.softmax, x.shape), [x], softmax(wide(x)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("length", [7, 64, 768, 1001])
def test_layer_norm_is_one_launch(length, dtype, rng):
    x, gamma, beta = (normal(rng, shape, dtype) for shape in ((3, 5, length), (length,), (length,)))
    func = legalised(lambda *v: op.nn.layer_norm(*v, axes=[-1]), x.shape, gamma.shape, beta.shape, dtype=dtype)
    _, kernel = check(func, [x, gamma, beta], layer_norm(wide(x), wide(gamma), wide(beta)))
    assert launch_count(kernel) == 1


def test_rms_norm_is_one_launch(rng):
    x, gamma = normal(rng, (4, 7, 640)), normal(rng, (640,))
    func = legalised(lambda *v: op.nn.rms_norm(*v, axes=[-1]), x.shape, gamma.shape)
    expected = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma
    _, kernel = check(func, [x, gamma], expected)
    assert launch_count(kernel) == 1


def test_group_norm(rng):
    x, gamma, beta = (normal(rng, shape) for shape in ((2, 16, 6, 6), (16,), (16,)))
    func = legalised(
        lambda *v: op.nn.group_norm(*v, num_groups=4, channel_axis=1, axes=[2, 3]), x.shape, gamma.shape, beta.shape
    )
    rows = wide(x).reshape(2, 4, -1)
    scaled = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    check(func, [x, gamma, beta], scaled.reshape(x.shape) * gamma[:, None, None] + beta[:, None, None])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_feeds_softmax_is_fused(dtype, rng):
    """Attention scores are scaled and masked while they are read; both inputs are read once."""
    x, mask = te.placeholder((2, 4, 8, 128), dtype, "x"), te.placeholder((2, 1, 1, 128), dtype, "mask")
    func = from_te(x, mask, topi.nn.softmax(x * tirx.const(0.125, dtype) + mask))
    inputs = [normal(rng, (2, 4, 8, 128), dtype), normal(rng, (2, 1, 1, 128), dtype)]
    counters, kernel = check(func, inputs, softmax(wide(inputs[0]) * 0.125 + wide(inputs[1])))
    assert launch_count(kernel) == 1
    assert counters.sector_efficiency() == 1.0


def test_a_causal_mask_is_a_condition_on_the_position(rng):
    x = te.placeholder((3, 40, 40), "float32", "x")
    masked = te.compute(x.shape, lambda b, i, j: tirx.Select(j <= i, x[b, i, j], tirx.const(-1e9, "float32")), "masked")
    value = normal(rng, (3, 40, 40))
    expected = softmax(np.where(np.tril(np.ones((40, 40))) > 0, wide(value), -1e9))
    check(from_te(x, topi.nn.softmax(masked)), [value], expected)


def test_a_residual_and_layer_norm_are_one_launch(rng):
    shapes = [(16, 768), (16, 768), (768,), (768,)]
    x, y, gamma, beta = (te.placeholder(s, "float32", n) for s, n in zip(shapes, "xygb", strict=True))
    func = from_te(x, y, gamma, beta, topi.nn.layer_norm(x + y, gamma, beta, axis=[1]))
    inputs = [normal(rng, shape) for shape in shapes]
    first, second, scale, shift = map(wide, inputs)
    _, kernel = check(func, inputs, layer_norm(first + second, scale, shift))
    assert launch_count(kernel) == 1
    assert "held in registers" in kernel.notes[0]


def test_what_follows_softmax_is_fused(rng):
    x = te.placeholder((9, 100), "float32", "x")
    value = normal(rng, (9, 100))
    _, kernel = check(
        from_te(x, topi.nn.relu(topi.nn.softmax(x) * 2.0 - 0.01)),
        [value],
        np.maximum(softmax(wide(value)) * 2 - 0.01, 0),
    )
    assert launch_count(kernel) == 1


@pytest.mark.parametrize("device", ["nvidia-k80", "nvidia-v100", "nvidia-h200", "amd-mi50"])
def test_every_device_gets_right_kernels(device, rng):
    """Wavefronts of 64, blocks of 256 threads, few units and many."""
    x = normal(rng, (40, 500))
    check(legalised(op.nn.softmax, x.shape), [x], softmax(wide(x)), device=device)
    check(legalised(lambda v: op.mean(v, axis=[0]), x.shape), [x], wide(x).mean(0), device=device)


# --- pooling --------------------------------------------------------------------------------------------------------
def pooled(x, size, stride, pad, *, of_maximum):
    """Pooling of (n, c, h, w); an average counts the elements that exist."""
    n, c, h, w = x.shape
    edges = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    values = np.pad(x, edges, constant_values=-np.inf if of_maximum else 0)
    ones = np.pad(np.ones_like(x), edges)
    result = np.zeros((n, c, (h + 2 * pad - size) // stride + 1, (w + 2 * pad - size) // stride + 1))
    for i, j in np.ndindex(result.shape[2:]):
        window = (..., slice(i * stride, i * stride + size), slice(j * stride, j * stride + size))
        inside = values[window]
        result[..., i, j] = inside.max((2, 3)) if of_maximum else inside.sum((2, 3)) / ones[window].sum((2, 3))
    return result


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("of_maximum", [False, True])
@pytest.mark.parametrize(
    ("edge", "size", "stride", "pad"), [(21, 3, 2, 1), (14, 3, 1, 1), (13, 2, 2, 0), (11, 1, 2, 0)]
)
def test_pooling(edge, size, stride, pad, of_maximum, layout, rng):
    x = normal(rng, (2, 8, edge, edge))
    expected = pooled(wide(x), size, stride, pad, of_maximum=of_maximum)
    if layout == "NHWC":
        x, expected = np.ascontiguousarray(x.transpose(0, 2, 3, 1)), expected.transpose(0, 2, 3, 1)
    window = {"pool_size": (size, size), "strides": (stride, stride), "padding": (pad, pad), "layout": layout}

    def build(v):
        return op.nn.max_pool2d(v, **window) if of_maximum else op.nn.avg_pool2d(v, **window, count_include_pad=False)

    _, kernel = check(legalised(build, x.shape), [x], expected)
    assert launch_count(kernel) == 1


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 8), ("bfloat16", 4)])
def test_padded_windows_of_channels_are_vectors(dtype, width, rng):
    """The condition of the padding is one for a whole vector; bfloat16's is one on float32."""
    shape = (400, 9, 9, 64)
    func = legalised(lambda v: op.nn.max_pool2d(v, (3, 3), (2, 2), (1, 1), layout="NHWC"), shape, dtype=dtype)
    assert f"9 x {width} elements a thread" in row_kernel(func)[1].notes[0]
    x = normal(rng, (2, 9, 9, 64), dtype)
    expected = pooled(wide(x).transpose(0, 3, 1, 2), 3, 2, 1, of_maximum=True).transpose(0, 2, 3, 1)
    func = legalised(lambda v: op.nn.max_pool2d(v, (3, 3), (2, 2), (1, 1), layout="NHWC"), x.shape, dtype=dtype)
    check(func, [x], expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_global_pooling_across_channels_is_coalesced(dtype, rng):
    x = normal(rng, (2, 7, 7, 64), dtype)
    counters, _ = check(legalised(lambda v: op.mean(v, axis=[1, 2]), x.shape, dtype=dtype), [x], wide(x).mean((1, 2)))
    assert counters.sector_efficiency() == 1.0


# --- refusals -------------------------------------------------------------------------------------------------------
def test_an_unsupported_combiner_is_refused_with_its_name():
    x, k = te.placeholder((5, 40), "float32", "x"), te.reduce_axis((0, 40), "k")
    last = te.comm_reducer(lambda a, b: a - b, lambda dtype: tirx.const(0.0, dtype))
    with pytest.raises(IllegalRewrite, match="combines by Sub"):
        row_kernel(from_te(x, te.compute((5,), lambda i: last(x[i, k], axis=k), "y")))


# --- the other rungs ------------------------------------------------------------------------------------------------
CASES = {
    "relu": (op.nn.relu, [(3, 1001)]),
    "transposition": (lambda v: op.permute_dims(v, [0, 2, 1]), [(2, 33, 65)]),
    "softmax": (op.nn.softmax, [(13, 100)]),
    "softmax of channels": (lambda v: op.nn.softmax(v, axis=1), [(2, 21, 9, 9)]),
    "layer norm": (lambda *v: op.nn.layer_norm(*v, axes=[-1]), [(6, 5, 768), (768,), (768,)]),
    "mean of a leading axis": (lambda v: op.mean(v, axis=[0]), [(300, 64)]),
    "sum of everything": (op.sum, [(500, 1003)]),
    "pooling": (lambda v: op.nn.max_pool2d(v, (3, 3), (2, 2), (1, 1)), [(2, 8, 21, 21)]),
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", CASES)
def test_opencl_gives_what_the_interpreter_gives(name, rng):
    """The same computations without shuffles: what CUDA does with them, OpenCL does with a tree in shared memory."""
    if reason := opencl_cpu.why_not():
        pytest.skip(reason)
    build, shapes = CASES[name]
    func, inputs = legalised(build, *shapes), [normal(rng, shape) for shape in shapes]
    expected, _, _ = interpreted(func, inputs)
    function, _ = row_kernel(func, "opencl")
    (actual,) = opencl_cpu.run_opencl(function, inputs)
    assert relative_error(actual, expected) < 1e-5


def test_kernels_compile_without_spills_and_within_their_plan():
    try:
        nvcc = find_nvcc()
    except UnsupportedEnvironmentError as error:
        pytest.skip(str(error))
    for name in ("softmax", "layer norm", "mean of a leading axis", "pooling"):
        build, shapes = CASES[name]
        function, kernel = row_kernel(legalised(build, *shapes))
        target = Target({"kind": "cuda", "arch": "sm_80"})
        source = tvm.compile(function, target=target).mod.imports[0].inspect_source()
        for use in compile_cuda(source, ["sm_80"], nvcc=nvcc).uses:
            assert use.spill_store_bytes == use.stack_bytes == 0
            assert use.register_count <= max(32, 1.25 * kernel.register_count)
            assert use.shared_bytes <= kernel.shared_bytes
