"""Running a built library the way Relay's graph executor did: set inputs by name, run, read outputs by index."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
import tvm_ffi

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import NUMPY_TYPES, Array, aligned_copy

from .machine import OneThread, ThreadSafeMachine, Turns

if TYPE_CHECKING:
    from tvm_ext._tvm import Tensor

Dimension = int | str

_CPU = tvm.cpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one input or output; a dimension that is only known at run time is a string.

    ``original_name`` is what the model file calls it, where that differs from ``name`` (an identifier).
    """

    name: str
    shape: tuple[Dimension, ...] | None  # None: even the rank is only known at run time
    dtype: str
    original_name: str = ""

    def __str__(self) -> str:
        shape = "unknown rank" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name}: {shape} {self.dtype}"

    def accepts(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether a tensor of ``shape`` and ``dtype`` fits; a dimension known only at run time takes any size."""
        if dtype != self.dtype or self.shape is None:
            return dtype == self.dtype
        return len(shape) == len(self.shape) and all(
            isinstance(expected, str) or expected == given for expected, given in zip(self.shape, shape, strict=True)
        )


class InputSetter:
    """What modules have in common whose ``inputs`` stay set between runs, for one thread at a time."""

    inputs: tuple[TensorSpec, ...]
    _values: dict[str, Any]
    _one_thread: OneThread

    def get_num_inputs(self) -> int:
        return len(self.inputs)

    def set_input(self, key: str | int | None = None, value: Any = None, **inputs: Any) -> None:
        """Set one input by name or index, or several by keyword; NumPy arrays are copied, tensors of the device kept.

        Values are NumPy arrays, TVM tensors, anything with ``__dlpack__``, or nested lists. NaN is legal.

        Raises
        ------
        InputError
            for an unknown name (with the nearest known ones), or a shape or dtype other than the input's.
        """
        given: dict[str | int, Any] = {}
        given.update(inputs)
        if key is not None:
            given[key] = value
        with self._one_thread:
            self._set(given)

    def _set(self, given: Mapping[Any, Any]) -> None:
        raise NotImplementedError

    def has_input(self, key: str | int) -> bool:
        """Whether input ``key`` has a value."""
        return self._spec(key).name in self._values

    def _spec(self, key: str | int) -> TensorSpec:
        if isinstance(key, str):
            return find_spec(self.inputs, key)
        if 0 <= key < len(self.inputs):
            return self.inputs[key]
        raise InputError(f"there is no input {key}.", f"the model has {len(self.inputs)} input(s), counted from 0")

    def arguments(self) -> list[Any]:
        """The values that are set, in the order of the inputs; raises InputError naming those that are not."""
        missing = [item for item in self.inputs if item.name not in self._values]
        if missing:
            raise InputError(
                "input(s) without a value: " + "; ".join(map(str, missing)) + ".",
                "set them with set_input(name, value) or run(name=value)",
            )
        return [self._values[item.name] for item in self.inputs]


class GraphModule(InputSetter):
    """A library on one device, with inputs that stay set between runs, for one thread at a time.

    Threads that work side by side take one each: they share code and constants. Calls of one GraphModule that overlap,
    and runs or outputs that would mix what two threads have set, raise ConcurrentUseError.

    Parameters
    ----------
    source
        A `Library`, another `GraphModule` (shares its device and loaded code, not its inputs), or the module that
        `tvm.runtime.load_module` returns for an exported library.
    device
        The TVM device; the CPU if left out.

    Examples
    --------
    >>> module = GraphModule(lib, tvm.cpu())          # or GraphModule(lib["default"](tvm.cpu()))
    >>> module.set_input("input", np.zeros((1, 3, 224, 224), "float32"))
    >>> module.run()
    >>> module.get_output(0).numpy()
    """

    def __init__(self, source: Any, device: tvm.runtime.Device | None = None) -> None:
        self.device: tvm.runtime.Device = device if device is not None else getattr(source, "device", tvm.cpu())
        self._library = _library_of(source)
        self.inputs: tuple[TensorSpec, ...] = self._library.inputs
        self._machine: ThreadSafeMachine | None = _spare_machine(source, self.device) or self._library.vm(self.device)
        self._main: Callable[..., Any] | None = None
        self._specs = {name: item for item in reversed(self.inputs) for name in (item.original_name, item.name)}
        self._plain = {item.name: plain for item in self.inputs if (plain := _PlainArrays.of(item, self.device))}
        self._values: dict[str, Tensor] = {}
        self._arguments: list[Tensor] | None = None  # for the next run, until an input is set
        self._result: Any = None  # of the last run
        self._outputs: list[Tensor] | None = None  # its tensors, once they are asked for: each costs a microsecond
        self._one_thread, self._turns = OneThread(), Turns()

    @property
    def vm(self) -> ThreadSafeMachine:
        """The VirtualMachine that runs it, which no other GraphModule uses."""
        if self._machine is None:
            self._machine = self._library.vm(self.device)
        return self._machine

    def get_num_outputs(self) -> int:
        """Number of outputs, tuples flattened; needs a `run` before."""
        return len(self._results())

    def get_input_info(self) -> tuple[dict[str, tuple[Dimension, ...] | None], dict[str, str]]:
        """Shapes and dtypes of the inputs, each by name."""
        return {item.name: item.shape for item in self.inputs}, {item.name: item.dtype for item in self.inputs}

    def _set(self, given: Mapping[Any, Any]) -> None:
        # All are checked before any is kept: a failed call changes nothing.
        checked: dict[str, Tensor] = {}
        for name, item in given.items():
            spec = self._spec(name)
            plain = self._plain.get(spec.name)
            quick = plain is not None and plain.copy(item)
            checked[spec.name] = quick or to_tensor(spec, item, self.device)
        self._values.update(checked)
        self._arguments = None
        for name in checked:
            self._turns.has_set(name)

    def get_input(self, key: str | int) -> tvm.runtime.Tensor:
        """The value last set for an input; raises InputError where none was."""
        spec = self._spec(key)
        if spec.name not in self._values:
            raise InputError(f"input {spec.name!r} has not been set.", f"call set_input({spec.name!r}, ...) first")
        value: tvm.runtime.Tensor = self._values[spec.name]
        return value

    def run(self, **inputs: Any) -> None:
        """Run once, after setting ``inputs``. Raises InputError naming every input that was never set."""
        with self._one_thread:
            if inputs:
                self._set(inputs)
            self._turns.check_inputs()
            if self._main is None:
                self._main = self.vm[self._library.entry]
            if self._arguments is None:
                self._arguments = self.arguments()
            self._result, self._outputs = self._main(*self._arguments), None
            self._turns.has_run()

    def get_output(self, index: int = 0, out: Any = None) -> Any:
        """Output ``index`` of the last run, or ``out``, a NumPy array or TVM tensor, with the output copied into it.

        Without ``out`` the tensor is the caller's: no later run writes to it, and its memory is used again once nothing
        refers to it. ``out`` spares a loop of runs new memory. Raises InputError unless index, shape and dtype fit.
        """
        with self._one_thread:
            self._turns.check_outputs()
            results = self._results()
            if not -len(results) <= index < len(results):
                raise InputError(
                    f"there is no output {index}.", f"the model has {len(results)} output(s), counted from 0"
                )
            result = results[index]
            if not isinstance(out, np.ndarray):
                return result if out is None else result.copyto(out)
            values = np.from_dlpack(result) if self.device == _CPU else result.numpy()
            if values.shape != out.shape or values.dtype != out.dtype:
                raise InputError(
                    f"output {index} is {values.dtype} of shape {values.shape}, and out {out.dtype} of {out.shape}.",
                    f"pass out=np.empty({values.shape}, {str(values.dtype)!r})",
                )
            out[...] = values
            return out

    def benchmark(
        self,
        device: tvm.runtime.Device | None = None,
        func_name: str = "main",
        repeat: int = 5,
        number: int = 5,
        min_repeat_ms: int = 0,
        **inputs: Any,
    ) -> Any:
        """Time the model: ``repeat`` measurements, each the mean of ``number`` runs, after one warm-up run.

        Returns TVM's BenchmarkResult, in seconds (``.median``, ``.mean``, ``.results``).
        """
        with self._one_thread:
            self._set(inputs)
            function = self._library.entry if func_name in ("run", "main") else func_name
            timer = self.vm.time_evaluator(
                function, device or self.device, number=number, repeat=repeat, min_repeat_ms=min_repeat_ms
            )
            return timer(*self.arguments())

    def _spec(self, key: str | int) -> TensorSpec:
        return (self._specs.get(key) if isinstance(key, str) else None) or super()._spec(key)

    def _results(self) -> list[Tensor]:
        if self._result is None:
            raise InputError("there are no outputs yet.", "call run() first")
        if self._outputs is None:
            self._outputs = list(flatten_outputs(self._result))
        return self._outputs


@dataclass(frozen=True, slots=True)
class _PlainArrays:
    """The NumPy arrays of one input that are copied without a question: 4 us of set_input instead of 21."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, spec: TensorSpec, device: tvm.runtime.Device) -> _PlainArrays | None:
        """None on GPUs, for open dimensions, and for types that NumPy lacks."""
        shape = spec.shape
        if (
            device != _CPU
            or shape is None
            or not all(isinstance(n, int) for n in shape)
            or spec.dtype not in NUMPY_TYPES
        ):
            return None
        return cls(tuple(map(int, shape)), np.dtype(spec.dtype))

    def copy(self, value: Any) -> Tensor | None:
        """``value`` as a tensor; None where it is no such array."""
        if not isinstance(value, np.ndarray) or value.shape != self.shape or value.dtype != self.dtype:
            return None
        return tvm_ffi.from_dlpack(aligned_copy(value))  # no tensor of TVM's, to which NumPy before 2.1 cannot write


def find_spec(specs: Sequence[TensorSpec], name: str) -> TensorSpec:
    """The spec called ``name``, by its identifier or the model file's name; raises InputError with the nearest ones."""
    for spec in specs:
        if name in (spec.name, spec.original_name):
            return spec
    known = [spec.name for spec in specs]
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
    raise InputError(
        f"there is no input called {name!r}.", f"{hint}The inputs are: " + ("; ".join(map(str, specs)) or "none")
    )


def to_tensor(spec: TensorSpec, value: Any, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    """``value`` as a TVM tensor on ``device``; raises InputError unless its shape and dtype are ``spec``'s."""
    value = checked(spec, value)
    if isinstance(value, np.ndarray):
        return tvm.runtime.tensor(np.ascontiguousarray(value).reshape(value.shape), device=device)
    return value if value.device == device else value.copyto(device)


def checked(spec: TensorSpec, value: Any) -> Any:
    """``value`` as an array, or the tensor that it is; raises InputError unless its shape and dtype are ``spec``'s."""
    if not isinstance(value, tvm.runtime.Tensor | np.ndarray):
        value = np.from_dlpack(value) if hasattr(value, "__dlpack__") else _as_array(spec, value)
    shape, dtype = tuple(int(size) for size in value.shape), str(value.dtype)
    if not spec.accepts(shape, dtype):
        given = "x".join(map(str, shape)) or "scalar"
        raise InputError(
            f"input {spec.name!r} expects {str(spec).split(': ')[1]}, but was given {given} {dtype}.",
            _remedy(spec, dtype),
        )
    return value


def _as_array(spec: TensorSpec, value: Any) -> Array:
    """Numbers and nested lists, which have no dtype of their own, take the input's."""
    try:
        return np.asarray(value, dtype=spec.dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"input {spec.name!r} cannot be made a tensor: {error}.", "pass a NumPy array") from error


def _remedy(spec: TensorSpec, dtype: str) -> str:
    if dtype != spec.dtype:
        return f'convert it, e.g. value.astype("{spec.dtype}")'
    return "pass an array of the expected shape, or build the model for this one (from_onnx(..., shape={name: [...]}))"


def flatten_outputs(value: Any) -> Iterator[Tensor]:
    """The tensors of a VM result in order: tuples flattened, a shape value as an int64 vector."""
    if isinstance(value, tvm.runtime.Tensor):
        yield value
    elif isinstance(value, tvm.runtime.ShapeTuple):
        yield tvm.runtime.tensor(np.asarray(list(value), dtype="int64"))
    elif isinstance(value, int | float):
        yield tvm.runtime.tensor(np.asarray(value))
    else:
        for item in value:
            yield from flatten_outputs(item)


def _library_of(source: Any) -> Any:
    if isinstance(source, GraphModule):
        return source._library
    from .library import Library

    return source if isinstance(source, Library) else Library.from_module(source)


def _spare_machine(source: Any, device: tvm.runtime.Device) -> ThreadSafeMachine | None:
    """The machine of a GraphModule on ``device`` that was not used yet; it makes another if it is used after all.

    For ``GraphModule(lib["default"](device))``, as old code writes it: on a GPU each machine copies the constants.
    """
    if not isinstance(source, GraphModule) or source.device != device or source._values or source._result is not None:
        return None
    with source._one_thread:
        machine, source._machine = source._machine, None
    return machine
