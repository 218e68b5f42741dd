"""Recurrent cells as the import of a network makes them: one operator whose product is read at several places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_ext._tvm import IRModule, PrimFunc, Sequential, relax

from .small_modules import inputs_of

Array = np.ndarray[Any, Any]


class _Numbers:
    """What cells use of ``relax.op``, of arrays."""

    add, subtract, multiply, tanh, clip = np.add, np.subtract, np.multiply, np.tanh, np.clip
    matmul, permute_dims, split = np.matmul, np.transpose, np.split

    @staticmethod
    def sigmoid(x: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-x)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellCase:
    """A cell: ``compute`` gives its outputs for ``relax.op`` or the same operators of arrays, and inputs.

    ``weights`` are the positions of the inputs that are constants.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    weights: tuple[int, ...]
    compute: Callable[..., Sequence[Any]]
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    def module(self) -> IRModule:
        """``main`` that calls the cell, whose operators still are operators."""
        builder = relax.BlockBuilder()
        inputs = inputs_of(*self.shapes, dtype=self.dtype)
        with builder.function("cell", inputs, attrs={"Primitive": True}, private=True):
            with builder.dataflow():
                result = builder.emit_output(
                    relax.Tuple([builder.emit(item) for item in self.compute(relax.op, *inputs)])
                )
            cell = builder.emit_func_output(result)
        inputs = inputs_of(*self.shapes, dtype=self.dtype)
        with builder.function("main", inputs):
            with builder.dataflow():
                result = builder.emit_output(cell(*inputs))
            builder.emit_func_output(result)
        return builder.get()

    def function(self) -> PrimFunc:
        """The one TensorIR function that it becomes; its outputs are its last parameters."""
        fused = Sequential([relax.transform.LegalizeOps(), relax.transform.FuseTIR()])(self.module())
        (function,) = (func for _, func in fused.functions_items() if isinstance(func, PrimFunc))
        return function

    def inputs(self, seed: int = 0) -> list[Array]:
        """Random inputs whose sums are of the size of the activations' bends."""
        random = np.random.default_rng(seed)
        scales = [shape[-1] ** -0.5 if i in self.weights else 1.0 for i, shape in enumerate(self.shapes)]
        return [
            (random.standard_normal(shape) * scale).astype(self.dtype)
            for shape, scale in zip(self.shapes, scales, strict=True)
        ]

    def expected(self, inputs: Sequence[Array]) -> list[Array]:
        return list(self.compute(_Numbers, *(array.astype("float64") for array in inputs)))


def _product(op: Any, state: Any, weights: Any) -> Any:
    return op.matmul(state, op.permute_dims(weights))


def _split(op: Any, value: Any, count: int) -> list[Any]:
    parts = op.split(value, count, axis=1)
    return [parts[n] for n in range(count)]


def _mixed(op: Any, z: Any, new: Any, old: Any) -> Any:
    """(1 - z) new + z old."""
    return op.add(op.subtract(new, op.multiply(z, new)), op.multiply(z, old))


def lstm(units: int, batch: int, *, holes: bool = False, clip: float | None = None, dtype: str = "float32") -> CellCase:
    """Inputs: what the gates get from outside, h, c, the weights of the gates i, o, f, c, and peepholes of i, o, f."""

    def compute(op: Any, outside: Any, h: Any, c: Any, weights: Any, *peepholes: Any) -> list[Any]:
        sums = op.add(outside, _product(op, h, weights))
        if clip is not None:
            sums = op.clip(sums, -clip, clip)
        i, o, f, g = _split(op, sums, 4)
        if holes:
            i, f = op.add(i, op.multiply(c, peepholes[0])), op.add(f, op.multiply(c, peepholes[2]))
        state = op.add(op.multiply(op.sigmoid(f), c), op.multiply(op.sigmoid(i), op.tanh(g)))
        if holes:
            o = op.add(o, op.multiply(state, peepholes[1]))
        return [op.multiply(op.sigmoid(o), op.tanh(state)), state]

    return CellCase(
        name=f"lstm {units} x {batch}" + " with peepholes" * holes + " clipped" * (clip is not None),
        shapes=((batch, 4 * units), (batch, units), (batch, units), (4 * units, units), *((units,),) * 3 * holes),
        weights=(3,),
        compute=compute,
        dtype=dtype,
    )


def gru_after(units: int, batch: int) -> CellCase:
    """The reset gate after the product (linear_before_reset 1): one product of the gates z, r and h."""

    def compute(op: Any, outside: Any, h: Any, weights: Any, bias: Any) -> list[Any]:
        xz, xr, xh = _split(op, outside, 3)
        hz, hr, hh = _split(op, op.add(_product(op, h, weights), bias), 3)
        z, r = op.sigmoid(op.add(xz, hz)), op.sigmoid(op.add(xr, hr))
        return [_mixed(op, z, op.tanh(op.add(xh, op.multiply(r, hh))), h)]

    return CellCase(
        name=f"gru {units} x {batch}, reset after the product",
        shapes=((batch, 3 * units), (batch, units), (3 * units, units), (3 * units,)),
        weights=(2,),
        compute=compute,
    )


def gru_before(units: int, batch: int) -> CellCase:
    """The reset gate before the product (linear_before_reset 0): a second product, of the state after its reset."""

    def compute(op: Any, outside: Any, h: Any, gates: Any, weights: Any) -> list[Any]:
        xz, xr, xh = _split(op, outside, 3)
        hz, hr = _split(op, _product(op, h, gates), 2)
        z, r = op.sigmoid(op.add(xz, hz)), op.sigmoid(op.add(xr, hr))
        return [_mixed(op, z, op.tanh(op.add(xh, _product(op, op.multiply(r, h), weights))), h)]

    return CellCase(
        name=f"gru {units} x {batch}, reset before the product",
        shapes=((batch, 3 * units), (batch, units), (2 * units, units), (units, units)),
        weights=(2, 3),
        compute=compute,
    )


def rnn(units: int, batch: int) -> CellCase:
    """One gate: a product with an epilogue, which any operator may be."""

    def compute(op: Any, outside: Any, h: Any, weights: Any) -> list[Any]:
        return [op.tanh(op.add(outside, _product(op, h, weights)))]

    return CellCase(
        name=f"rnn {units} x {batch}",
        shapes=((batch, units), (batch, units), (units, units)),
        weights=(2,),
        compute=compute,
    )


def _step(op: Any, kind: int, a: Any, b: Any, c: Any) -> Any:
    if kind == 0:
        return op.add(op.tanh(a), b)
    if kind == 1:
        return op.multiply(a, op.sigmoid(b))
    if kind == 2:
        return op.subtract(b, op.multiply(a, c))
    if kind == 3:
        return op.clip(op.add(a, b), -0.5, 2.0)
    return op.tanh(op.add(op.sigmoid(a), op.multiply(b, b)))


def random_cell(seed: int) -> CellCase:
    """One to five gates in any order, of which one may stay unused; sometimes a second state of another width with
    weights of its own; activations of single gates or of all at once; one or two outputs.
    """
    random = np.random.default_rng(seed)
    gates, batch = int(random.integers(1, 6)), int(random.choice([1, 2, 3, 7, 13]))
    units, depth, inner = (int(random.choice([1, 5, 16, 19, 33, 48])) for _ in range(3))
    order = [int(gate) for gate in random.permutation(gates)][: gates - (random.integers(8) == 0 and gates > 1)]
    two, wide = bool(random.integers(2)), bool(random.integers(2))
    kinds = [int(random.integers(5)) for _ in order]
    outputs = int(random.integers(1, 3))

    def compute(op: Any, outside: Any, h: Any, c: Any, weights: Any, *second: Any) -> list[Any]:
        sums = _product(op, h, weights)
        if two:
            sums = op.add(sums, _product(op, *second))
        sums = op.add(outside, sums)
        parts = _split(op, op.sigmoid(sums) if wide else sums, gates) if gates > 1 else [sums]
        values = [c]
        for kind, gate in zip(kinds, order, strict=True):
            values.append(_step(op, kind, values[-1], parts[gate], c))
        return values[1:][-outputs:]

    more = ((batch, inner), (gates * units, inner)) if two else ()
    return CellCase(
        name=f"random cell {seed}: {gates} gates of {units} x {batch}" + ", two products" * two,
        shapes=((batch, gates * units), (batch, depth), (batch, units), (gates * units, depth), *more),
        weights=(3, 5) if two else (3,),
        compute=compute,
    )
