"""What an operator computes, by NumPy: the computations of `computations.read_operator` evaluated on arrays.

The axes of a computation are arrays of indices that broadcast against each other, each along its own dimension; a value
is evaluated node by node in the type that the node has, so that every rounding and every overflow is the kernel's. A
node that depends on two of five axes is an array over these two.

Worked example, ``y[i, j] = x[j, i] * 2`` of extents 3 and 4: i is an array of shape (3, 1), j one of (1, 4), the load
``x[j, i]`` one of (3, 4) by NumPy's indexing, and the product with 2 is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tvm_ext._tvm import IF_THEN_ELSE, Buffer, Expr, TensorLoad, Var
from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arrays import Array
from tvm_ext.support.limits import check_count, limits

from .computations import Computation, OperatorBody, dtype_of, static_shape
from .value_functions import BINARY, FUNCTIONS, REDUCTIONS, converted


def operator_values(operator: OperatorBody, inputs: Sequence[Array]) -> list[Array]:
    """The operator's outputs for ``inputs``, its parameters in order.

    Raises IllegalRewrite where it holds something that is not known here, an index is outside its tensor, an integer
    is divided by 0, or it would take more than `limits` allow.
    """
    known: dict[Buffer, Array] = dict(zip(operator.params, inputs, strict=False))
    total = sum(array.size for array in inputs)
    with np.errstate(all="ignore"):
        for computation in operator.computations:
            known[computation.target] = _computation_value(computation, known, total)
    return [known[output] for output in operator.outputs]


def _computation_value(computation: Computation, known: Mapping[Buffer, Array], total: int) -> Array:
    shape = static_shape(computation.target)
    if not _fills_its_target(computation, shape):
        raise IllegalRewrite(f"{computation.name} does not write its whole result element by element")
    values = _Values(computation, known, total)
    if not computation.is_reduction:
        _check_points(computation.point_count, total)
        result = values.of(computation.value)
    else:
        product = _product(computation, values)
        if product is None:
            _check_points(computation.point_count, total)
        result = _reduced(computation, values) if product is None else product
        result = BINARY[_COMBINE[str(computation.combiner)]](values.of(computation.init), result)
    if result.ndim:  # the axes of a reduction have one element by now
        result = result.reshape(
            [n for n, kind in zip(result.shape, computation.kinds, strict=True) if kind == "spatial"]
        )
    full = np.broadcast_to(result, [computation.extent(axis) for axis in computation.spatial])
    return np.ascontiguousarray(full).reshape(shape)


def _fills_its_target(computation: Computation, shape: Sequence[int]) -> bool:
    """Whether it writes each element of its target once, in the order of its axes; a scalar may have one unit axis."""
    extents = tuple(computation.extent(axis) for axis in computation.spatial)
    return (computation.writes_at_its_own_axes() and extents == tuple(shape)) or (prod(extents) == 1 == prod(shape))


_COMBINE = {"sum": "Add", "max": "Max", "min": "Min", "prod": "Mul"}


def _check_points(points: int, total: int) -> None:
    if points > total:
        check_count("folded_points", points, "points")


def _reduced(computation: Computation, values: _Values) -> Array:
    axes = tuple(position for position, kind in enumerate(computation.kinds) if kind == "reduce")
    value = values.of(computation.value)
    shape = value.shape if value.ndim else (1,) * len(computation.extents)
    # What does not depend on an axis of the reduction counts once for each of its points all the same.
    full = tuple(computation.extents[p] if p in axes else shape[p] for p in range(len(shape)))
    return REDUCTIONS[str(computation.combiner)](np.broadcast_to(value, full), axes)


def _product(computation: Computation, values: _Values) -> Array | None:
    """A sum of products as a product of matrices; None where it is no such sum.

    Each axis is one of: in both factors and the result (a batch), in both and summed, in one factor and the result.
    """
    if computation.combiner != "sum" or type(computation.value).__name__ != "Mul" or computation.point_count < 4096:
        return None
    a, b = (values.of(factor) for factor in (computation.value.a, computation.value.b))
    rank = len(computation.extents)
    if a.ndim != rank or b.ndim != rank or computation.point_count > limits().folded_products:
        return None
    kinds: dict[str, list[int]] = {"batch": [], "summed": [], "a": [], "b": []}
    for axis in range(rank):
        in_a, in_b = a.shape[axis] > 1, b.shape[axis] > 1
        if computation.extents[axis] == 1:
            continue
        if not (in_a or in_b) or (computation.kinds[axis] == "reduce" and not (in_a and in_b)):
            return None
        both = "summed" if computation.kinds[axis] == "reduce" else "batch"
        kinds[both if in_a and in_b else "a" if in_a else "b"].append(axis)
    return _by_matrices(a, b, kinds, computation.extents, dtype_of(computation.value))


def _by_matrices(
    a: Array, b: Array, kinds: Mapping[str, list[int]], extents: Sequence[int], dtype: str
) -> Array | None:
    wide = _exact_type(a, b, prod(extents[p] for p in kinds["summed"]), dtype)
    if wide is None:
        return None

    def matrix(array: Array, order: Sequence[str]) -> Array:
        axes = [axis for kind in order for axis in kinds[kind]]
        ones = [axis for axis in range(array.ndim) if axis not in axes]
        sizes = [prod(extents[p] for p in kinds[kind]) for kind in order]
        return np.asarray(array.transpose(axes + ones).reshape(sizes), wide)

    result = np.matmul(matrix(a, ("batch", "a", "summed")), matrix(b, ("batch", "summed", "b")))
    axes = kinds["batch"] + kinds["a"] + kinds["b"]
    spread = np.ones(len(extents), int)
    spread[axes] = [extents[p] for p in axes]
    laid = result.reshape([extents[p] for p in axes])
    back = laid.transpose(np.argsort(axes)) if axes else laid
    return np.asarray(back.reshape(spread), dtype)


def _exact_type(a: Array, b: Array, terms: int, dtype: str) -> str | None:
    """The type in which BLAS sums ``terms`` products: integers in float64 where that is exact, else None."""
    if dtype in ("float16", "float32"):
        return "float32"
    if dtype == "float64":
        return dtype
    bound = float(np.abs(a.astype("f8")).max()) * float(np.abs(b.astype("f8")).max()) * terms
    return "float64" if bound < min(2.0**53, float(np.iinfo(dtype).max)) else None


class _Values:
    """Evaluates expressions over the axes of one computation."""

    def __init__(self, computation: Computation, known: Mapping[Buffer, Array], total: int) -> None:
        self.known, self.total = known, total
        self.variables: dict[Var, Array] = {}
        self.positions = {variable: position for position, variable in enumerate(computation.variables)}
        rank = len(computation.variables)
        for position, (variable, extent) in enumerate(zip(computation.variables, computation.extents, strict=True)):
            shape = [extent if p == position else 1 for p in range(rank)]
            self.variables[variable] = np.arange(extent, dtype=dtype_of(variable)).reshape(shape)
        self.extents = computation.extents
        self.guards = 0  # how many conditions keep what is evaluated from being used

    def of(self, node: Expr) -> Array:
        """The value of ``node``, in its type: an array over the computation's axes, or of rank 0."""
        kind = type(node).__name__
        if kind in ("IntImm", "FloatImm"):
            return np.asarray(node.value, dtype=_known_type(node))
        if kind == "TensorLoad":
            return self._load(node)
        if kind in BINARY:
            return self._binary(kind, node)
        rule = getattr(self, f"_{kind.lower()}", None)
        if rule is None:
            raise IllegalRewrite(f"it holds a {kind}")
        value: Array = rule(node)
        return value

    def _var(self, node: Expr) -> Array:
        if node not in self.variables:
            raise IllegalRewrite(f"variable {node.name} has no known value")
        return self.variables[node]

    def _binary(self, kind: str, node: Expr) -> Array:
        a, b = self.of(node.a), self.of(node.b)
        if kind in ("Div", "Mod", "FloorDiv", "FloorMod") and a.dtype.kind in "iu" and (b == 0).any():
            if not self.guards:
                raise IllegalRewrite("an integer is divided by 0")
            b = np.where(b == 0, np.ones_like(b), b)
        return _typed(BINARY[kind](a, b), node)

    def _not(self, node: Expr) -> Array:
        return np.logical_not(self.of(node.a))

    def _bitwisenot(self, node: Expr) -> Array:
        return np.bitwise_not(self.of(node.a))

    def _cast(self, node: Expr) -> Array:
        return converted(self.of(node.value), _known_type(node), guarded=self.guards > 0)

    def _let(self, node: Expr) -> Array:
        self.variables[node.var] = self.of(node.value)
        return self.of(node.body)

    def _select(self, node: Expr) -> Array:
        return self._choice(node.condition, node.true_value, node.false_value)

    def _choice(self, condition: Expr, chosen: Expr, other: Expr) -> Array:
        where = self.of(condition)
        self.guards += 1
        values = [self.of(chosen), self.of(other)]
        self.guards -= 1
        return np.where(where, *values)

    def _call(self, node: Expr) -> Array:
        if node.op.same_as(IF_THEN_ELSE):
            return self._choice(*node.args)
        name = str(getattr(node.op, "name", "")).rpartition(".")[2]
        arguments = list(node.args)
        if name == "call_pure_extern":
            name, arguments = f"extern.{arguments[0].value}", arguments[1:]
        if name not in FUNCTIONS:
            raise IllegalRewrite(f"it calls {name}")
        return _typed(FUNCTIONS[name](*map(self.of, arguments)), node)

    def _load(self, load: TensorLoad) -> Array:
        if load.source not in self.known:
            raise IllegalRewrite(f"tensor {load.source.name} is not known")
        array = self.known[load.source]
        if not array.ndim:
            return array
        plain = self._plain(load, array)
        if plain is not None:
            return plain
        indices = []
        for index, size in zip(load.indices, array.shape, strict=True):
            value = self.of(index)
            if value.size and (int(value.min()) < 0 or int(value.max()) >= size):
                if not self.guards or not size:
                    raise IllegalRewrite(f"an index into {load.source.name} is outside of it")
                value = np.clip(value, 0, size - 1)
            indices.append(value)
        _check_points(prod(np.broadcast_shapes(*(value.shape for value in indices))), self.total)
        return np.asarray(array[tuple(indices)])

    def _plain(self, load: TensorLoad, array: Array) -> Array | None:
        """The tensor itself, its dimensions turned, where it is indexed by different whole axes and constants of 0."""
        axes: list[int] = []
        for index, size in zip(load.indices, array.shape, strict=True):
            position = self.positions.get(index, -1) if type(index).__name__ == "Var" else -1
            if position < 0 or position in axes or self.extents[position] != size:
                return None
            axes.append(position)
        turned: Array = array.transpose([axes.index(position) for position in sorted(axes)])
        return turned.reshape([self.extents[p] if p in axes else 1 for p in range(len(self.extents))])


_TYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)


def _known_type(node: Expr) -> str:
    dtype = dtype_of(node)
    if dtype not in _TYPES:
        raise IllegalRewrite(f"it computes in {dtype}")
    return dtype


def _typed(value: Array, node: Expr) -> Array:
    """``value``, which must have the type of ``node``: NumPy's rules of promotion are not TVM's."""
    dtype = _known_type(node)
    return value if str(value.dtype) == dtype else value.astype(dtype)
