"""Shapes that defeat blocking, tensors that lie oddly in memory, and thread counts that do not fit the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext.errors import InputError
from tvm_ext.records.choice import OWN_PATHS

Array = np.ndarray
Graph = Callable[..., Any]
RNG = np.random.default_rng(20)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype("float32")


def build(graph: Graph, *shapes: tuple[int, ...], dtype: str = "float32", **settings: Any) -> relay.Library:
    inputs = inputs_of(*shapes, dtype=dtype)
    return relay.build(module_of(inputs, graph(*inputs)), "llvm", **settings)


def run(graph: Graph, *values: Array) -> Array:
    """Built and run over arrays as they lie in memory; what has elements must be constructed.

    NumPy's arrays without elements have strides of 0, which the VM refuses: they are copied.
    """
    lib = build(graph, *[value.shape for value in values])
    if all(value.size for value in values):
        (operator,) = lib.report.operators
        assert operator.choice.path in OWN_PATHS
        return np.asarray(lib.vm()["main"](*values).numpy())
    module = relay.GraphModule(lib)
    module.run(**{f"x{i}": value for i, value in enumerate(values)})
    return np.asarray(module.get_output(0).numpy())


def assert_close(actual: Array, wanted: Array, allowed: float = 1e-5) -> None:
    assert actual.shape == wanted.shape
    difference = np.linalg.norm((actual.astype("float64") - wanted.astype("float64")).ravel())
    assert difference <= allowed * np.linalg.norm(wanted.astype("float64").ravel())


def wide(value: Array) -> Array:
    return value.astype("float64")


def convolve(x: Array, w: Array, groups: int = 1) -> Array:
    """3x3 or 1x1, stride 1, "same" padding, in float64; depthwise where ``groups`` is not 1."""
    border = w.shape[2] // 2
    padded = np.pad(wide(x), ((0, 0), (0, 0), (border, border), (border, border)))
    out = np.zeros((x.shape[0], w.shape[0], *x.shape[2:]))
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            part = padded[:, :, i : i + x.shape[2], j : j + x.shape[3]]
            tap = wide(w[:, :, i, j])
            out += part * tap[None, :, 0, None, None] if groups != 1 else np.einsum("nchw,oc->nohw", part, tap)
    return out


# --- shapes -----------------------------------------------------------------------------------------------------------
def test_primes() -> None:
    x, w = normal(1, 13, 17, 19), normal(29, 13, 3, 3)
    assert_close(run(lambda a, b: relax.op.nn.conv2d(a, b, padding=1), x, w), convolve(x, w))
    a, b = normal(127, 257), normal(257, 61)
    assert_close(run(relax.op.matmul, a, b), wide(a) @ wide(b))
    x, w = normal(1, 37, 23, 29), normal(37, 1, 3, 3)
    assert_close(run(lambda a, b: relax.op.nn.conv2d(a, b, padding=1, groups=37), x, w), convolve(x, w, 37))


def test_every_extent_one() -> None:
    x, w = normal(1, 1, 1, 1), normal(1, 1, 1, 1)
    assert_close(run(relax.op.nn.conv2d, x, w), x * w)
    assert_close(run(relax.op.matmul, x, w), x * w)
    assert_close(run(relax.op.nn.max_pool2d, x), x)
    assert_close(run(lambda a: relax.op.nn.softmax(a), x), np.ones_like(x))
    assert_close(run(lambda a: relax.op.mean(a), x), x.reshape(()))


EMPTY: dict[str, tuple[Graph, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "relu": (relax.op.nn.relu, ((3, 0, 5),), (3, 0, 5)),
    "no rows": (relax.op.matmul, ((0, 5), (5, 7)), (0, 7)),
    "no columns": (relax.op.matmul, ((3, 5), (5, 0)), (3, 0)),
    "nothing to sum": (relax.op.matmul, ((3, 0), (0, 7)), (3, 7)),
    "batch": (relax.op.matmul, ((2, 0, 5), (2, 5, 7)), (2, 0, 7)),
    "conv": (lambda x, w: relax.op.nn.conv2d(x, w, padding=1), ((0, 3, 8, 8), (4, 3, 3, 3)), (0, 4, 8, 8)),
    "depthwise": (lambda x, w: relax.op.nn.conv2d(x, w, groups=5), ((0, 5, 8, 8), (5, 1, 3, 3)), (0, 5, 6, 6)),
    "pool": (lambda x: relax.op.nn.max_pool2d(x, (2, 2)), ((0, 3, 8, 8),), (0, 3, 7, 7)),
    "sum": (lambda x: relax.op.sum(x, axis=[1]), ((3, 0),), (3,)),
    "softmax": (lambda x: relax.op.nn.softmax(x), ((0, 7),), (0, 7)),
    "softmax of nothing": (lambda x: relax.op.nn.softmax(x), ((7, 0),), (7, 0)),
    "transpose": (relax.op.permute_dims, ((3, 0),), (0, 3)),
    "concat": (lambda x, y: relax.op.concat([x, y], axis=1), ((3, 0), (3, 0)), (3, 0)),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", EMPTY)
def test_dimensions_of_size_zero(name: str) -> None:
    """A sum over nothing is 0, all other results here have no elements."""
    graph, shapes, result = EMPTY[name]
    np.testing.assert_array_equal(run(graph, *[normal(*shape) for shape in shapes]), np.zeros(result, "float32"))


def test_long_thin_products() -> None:
    """K of a million; M of a million; one row and one column."""
    a, b = normal(1, 1 << 20), normal(1 << 20, 8)
    assert_close(run(relax.op.matmul, a, b), wide(a) @ wide(b), allowed=6e-8 * 2 * 1024)
    a, b = normal(1 << 20, 4), normal(4, 3)
    assert_close(run(relax.op.matmul, a, b), wide(a) @ wide(b))
    a, b = normal(1009, 1), normal(1, 1013)
    assert_close(run(relax.op.matmul, a, b), wide(a) @ wide(b))


def test_long_rows() -> None:
    x = np.abs(normal(1 << 20))
    assert_close(run(lambda a: relax.op.sum(a), x), wide(x).sum(), allowed=6e-8 * 2 * 1024)
    row = x.reshape(1, -1)
    powers = np.exp(wide(row) - row.max())
    assert_close(run(lambda a: relax.op.nn.softmax(a), row), powers / powers.sum(), allowed=1e-4)
    assert_close(run(lambda a: relax.op.max(a, axis=[1]), row), row.max(axis=1))


@pytest.mark.slow
def test_sizes_near_the_limits_of_32_bits() -> None:
    """2^26 elements one by one, 2^24 summed, and offsets of more than 2^31 bytes and elements. About 2.5 GB."""
    x = np.abs(np.random.default_rng(0).random(1 << 26, dtype="float32"))
    np.testing.assert_array_equal(run(lambda a: relax.op.add(a, a), x), x + x)
    part = x[: 1 << 24]
    assert_close(run(lambda a: relax.op.sum(a), part), wide(part).sum(), allowed=1e-4)
    del x, part
    many = np.zeros((2, 2**30 + 500), "int8")
    many[0, -1], many[1, -1] = 3, 5
    lib = build(lambda a: relax.op.max(a, axis=[1]), many.shape, dtype="int8")
    assert list(lib.vm()["main"](many).numpy()) == [3, 5]
    del many
    far = np.zeros(2**29 + 16, "float32")
    far[-1], far[0] = 5, 3
    assert float(run(lambda a: relax.op.sum(a), far)) == 8.0


# --- memory -----------------------------------------------------------------------------------------------------------
A, B = normal(37, 53), normal(53, 29)
PRODUCT = np.maximum(wide(A) @ wide(B), 0)


@pytest.fixture(scope="module")
def library() -> relay.Library:
    return build(lambda a, b: relax.op.nn.relu(relax.op.matmul(a, b)), A.shape, B.shape)


def at_offset(value: Array, offset_bytes: int) -> Array:
    """A copy of ``value`` that begins ``offset_bytes`` behind a 64-byte boundary."""
    room = np.zeros(value.nbytes + 128, "uint8")
    start = -room.ctypes.data % 64 + offset_bytes
    view = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    view[...] = value
    return view


def spread(value: Array) -> Array:
    """``value`` as every other row and third column of a larger array."""
    room = np.full((2 * value.shape[0], 3 * value.shape[1]), np.nan, value.dtype)
    room[::2, ::3] = value
    return room[::2, ::3]


class Foreign:
    """A tensor of another library: known by its ``__dlpack__`` alone."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


OFFSETS = [1, 2, 3, 4, 8, 12, 16, 20, 32, 36, 60, 63]


@pytest.mark.parametrize("offset", OFFSETS)
def test_unaligned_tensors(library: relay.Library, offset: int) -> None:
    """Through the VM, which takes an array as it lies, and through GraphModule."""
    a, b = at_offset(A, offset), at_offset(B, 64 - offset)
    assert a.ctypes.data % 64 == offset
    assert_close(library.vm()["main"](a, b).numpy(), PRODUCT)
    module = relay.GraphModule(library)
    module.run(x0=a, x1=b)
    assert_close(module.get_output(0).numpy(), PRODUCT)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "graph",
    [
        lambda x: relax.op.nn.softmax(x),
        lambda x: relax.op.nn.gelu(x),
        lambda x: relax.op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
        lambda x: relax.op.mean(x, axis=[2, 3]),
        lambda x: relax.op.permute_dims(x, [0, 2, 3, 1]),
        lambda x: relax.op.nn.conv2d(x, relax.const(np.ones((8, 1, 3, 3), "float32")), padding=1, groups=8),
        lambda x: relax.op.nn.conv2d(x, relax.const(np.ones((33, 8, 3, 3), "float32")), strides=2),
        lambda x: relax.op.argmax(x, axis=3),
        lambda x: relax.op.cumsum(x, axis=3),
    ],
    ids=["softmax", "gelu", "pool", "mean", "transpose", "depthwise", "conv", "argmax", "cumsum"],
)
def test_every_kind_of_kernel_takes_unaligned_tensors(graph: Graph) -> None:
    x = normal(2, 8, 17, 19)
    machine = build(graph, x.shape).vm()
    aligned = machine["main"](at_offset(x, 0)).numpy()
    assert np.isfinite(aligned).all()
    for offset in (1, 4, 20):
        np.testing.assert_array_equal(machine["main"](at_offset(x, offset)).numpy(), aligned)


@pytest.mark.parametrize("odd", [np.asfortranarray, spread, lambda x: x[::-1, ::-1].copy()[::-1, ::-1]])
@pytest.mark.parametrize("wrap", [lambda x: x, Foreign], ids=["numpy", "dlpack"])
def test_graph_module_takes_tensors_with_gaps(
    library: relay.Library, odd: Callable[[Array], Array], wrap: Callable[[Array], Any]
) -> None:
    module = relay.GraphModule(library)
    module.set_input("x0", wrap(odd(A)))
    module.set_input("x1", wrap(odd(B)))
    module.run()
    assert_close(module.get_output(0).numpy(), PRODUCT)


def test_graph_module_copies_what_it_is_given(library: relay.Library) -> None:
    """A broadcast view, which repeats one row, and an array that is changed after it was set."""
    module = relay.GraphModule(library)
    module.set_input("x0", np.broadcast_to(A[:1], A.shape))
    changing = B.copy()
    module.set_input("x1", changing)
    changing[...] = np.nan
    module.run()
    assert_close(module.get_output(0).numpy(), np.broadcast_to(PRODUCT[:1], PRODUCT.shape))


@pytest.mark.parametrize("odd", [np.asfortranarray, spread])
def test_the_machine_refuses_tensors_with_gaps(library: relay.Library, odd: Callable[[Array], Array]) -> None:
    """It passes them on without a copy; what the kernel checks first is their strides."""
    with pytest.raises(ValueError, match=r"Mismatched x0\.strides"):
        library.vm()["main"](odd(A), B)


@pytest.mark.parametrize(
    ("value", "problem", "remedy"),
    [
        (A.astype("float64"), "expects 37x53 float32, but was given 37x53 float64", 'astype("float32")'),
        (A.astype("int32"), "was given 37x53 int32", 'astype("float32")'),
        (A.astype(">f4"), "was given 37x53 >f4", 'astype("float32")'),
        (A.T, "was given 53x37 float32", "expected shape"),
        (A[0], "was given 53 float32", "expected shape"),
        (A[:0], "was given 0x53 float32", "expected shape"),
        (Foreign(A.astype("float64")), "was given 37x53 float64", 'astype("float32")'),
        (tvm.runtime.tensor(A.astype("float16")), "was given 37x53 float16", 'astype("float32")'),
    ],
)
def test_wrong_shapes_and_types_are_named(library: relay.Library, value: Any, problem: str, remedy: str) -> None:
    module = relay.GraphModule(library)
    with pytest.raises(InputError) as caught:
        module.set_input("x0", value)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_the_machine_refuses_wrong_shapes_and_types(library: relay.Library) -> None:
    machine = library.vm()["main"]
    with pytest.raises(ValueError, match="expect Tensor with dtype float32 but get float64"):
        machine(A.astype("float64"), B)
    with pytest.raises(RuntimeError, match=r"30 vs\. 37"):
        machine(A[:30].copy(), B)


# --- threads ----------------------------------------------------------------------------------------------------------
THREADED = """
    import json, sys
    import numpy as np
    from tvm import relax
    from tests.support.small_modules import inputs_of, module_of
    from tvm_ext import relay
    def build(num_threads):
        inputs = inputs_of((300, 300), (300, 300))
        module = module_of(inputs, relax.op.nn.softmax(relax.op.matmul(*inputs)))
        return relay.build(module, "llvm", num_threads=num_threads)
    a, b = np.random.default_rng(0).standard_normal((2, 300, 300)).astype("float32") / 4
    powers = np.exp(a.astype("float64") @ b)
    right = powers / powers.sum(axis=1, keepdims=True)
    errors = {}
    for count in (1, 3, 64):
        output = build(count).vm()["main"](a, b).numpy()
        errors[str(count)] = float(np.linalg.norm(output - right) / np.linalg.norm(right))
    print(json.dumps(errors))
"""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("pool", ["1", "8"])
def test_more_and_fewer_threads_than_cores(pool: str, run_python: Callable[..., Any]) -> None:
    """Kernels divided for 1 to 64 cores, on a pool of one thread and of eight."""
    result = run_python(dedent(THREADED), TVM_NUM_THREADS=pool)
    assert result.returncode == 0, result.stderr
    errors = json.loads(result.stdout)
    assert set(errors) == {"1", "3", "64"}
    assert max(errors.values()) <= 1e-5
