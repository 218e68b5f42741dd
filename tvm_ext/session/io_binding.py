"""`IOBinding`: inputs and outputs that stay bound between runs of an `InferenceSession`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array


class IOBinding:
    """Made by `InferenceSession.io_binding`, which names its outputs. Memory is the CPU's."""

    def __init__(self, outputs: Sequence[str]) -> None:
        self._known = tuple(outputs)
        self.feed: dict[str, Any] = {}
        self._into: dict[str, Array | None] = {}
        self._results: list[Array] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: Array) -> None:
        """Each run reads input ``name`` from this array as it then is."""
        self.feed[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Each run reads input ``name`` from the memory at ``buffer_ptr``, which holds ``shape`` in row-major order."""
        self.feed[name] = _at(device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Each run reads input ``name`` from an OrtValue of ONNX Runtime."""
        self.feed[name] = ortvalue

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Ask for output ``name``, in new memory, or in that at ``buffer_ptr``."""
        if name not in self._known:
            raise InputError(f"there is no output called {name!r}.", f"the outputs are: {', '.join(self._known)}")
        if buffer_ptr is None:
            self._into[name] = None
            return
        if element_type is None or shape is None:
            raise InputError(f"output {name!r} is bound to memory of unknown type or shape.", "give both")
        self._into[name] = _at(device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Ask for output ``name`` in an OrtValue's memory."""
        self.bind_output(name, "cpu", 0, ortvalue.numpy().dtype, ortvalue.shape(), ortvalue.data_ptr())

    def output_names(self) -> list[str]:
        """The outputs asked for, in the order in which they were bound; raises InputError where there is none."""
        if not self._into:
            raise InputError("no output is bound.", "call bind_output(name) for each output you want")
        return list(self._into)

    def take(self, results: Sequence[Array]) -> None:
        """Keep the ``results`` of a run: copied to the bound memory, which must fit."""
        kept = []
        for (name, into), result in zip(self._into.items(), results, strict=True):
            if into is not None:
                if into.shape != result.shape or into.dtype != result.dtype:
                    raise InputError(
                        f"output {name!r} is {result.dtype} of shape {result.shape}, "
                        f"and bound to {into.dtype} of {into.shape}.",
                        "bind memory of the output's own type and shape",
                    )
                into[...] = result
            kept.append(result if into is None else into)
        self._results = kept

    def copy_outputs_to_cpu(self) -> list[Array]:
        """The outputs of the last run as arrays, in the order in which they were bound."""
        return list(self._results)

    def get_outputs(self) -> list[Any]:
        """The outputs of the last run as OrtValues, for which onnxruntime must be installed."""
        import onnxruntime

        return [onnxruntime.OrtValue.ortvalue_from_numpy(result) for result in self._results]

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self.feed.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self._into.clear()

    def synchronize_inputs(self) -> None:
        """Nothing is under way between calls."""

    def synchronize_outputs(self) -> None:
        """Nothing is under way between calls."""


def _at(device_type: str, element_type: Any, shape: Sequence[int], pointer: int) -> Array:
    """The memory at ``pointer`` as an array."""
    if device_type != "cpu":
        raise InputError(f"memory of device {device_type!r} cannot be bound.", "bind memory of the CPU")
    if isinstance(element_type, int):
        import onnx

        element_type = onnx.helper.tensor_dtype_to_np_dtype(element_type)
    dtype = np.dtype(element_type)
    memory = (ctypes.c_byte * (prod(shape) * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, dtype).reshape(tuple(shape))
