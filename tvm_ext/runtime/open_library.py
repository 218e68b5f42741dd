"""A library with open dimensions: variants of one model for several sizes, chosen when it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
import tvm_ffi

from tvm_ext.errors import InputError
from tvm_ext.records import serialise
from tvm_ext.support.arrays import Array, aligned_copy

from .batches import cut, join
from .export import export_again, export_executable
from .graph_module import GraphModule, InputSetter, TensorSpec, checked
from .library import ExportParts, Library, Signature, load_module, metadata_of
from .machine import OneThread, ThreadSafeMachine, Turns
from .open_signature import OpenReport, OpenSignature, parts_of, variant_of

if TYPE_CHECKING:
    from tvm_ext._tvm import Executable, Tensor


class OpenLibrary:
    """A built model with open dimensions, which `relay.build_open` makes.

    ``lib["default"](device)`` gives an `OpenModule`, which runs any size that the dimensions allow.

    * ``inputs``, ``outputs``: `TensorSpec` of each, with the names of open dimensions in their shapes.
    * ``dimensions``, ``variants``: `OpenDimension` and `Variant` of each. The function of a variant in the Relax
      VirtualMachine has its name.
    * ``report``: the `OpenReport`.
    * ``executable``: as of `Library`.
    """

    def __init__(
        self,
        executable: Executable,
        signature: OpenSignature,
        file: tuple[Path, str] | None = None,
        code: ExportParts | None = None,
    ) -> None:
        self.executable, self._file, self._code = executable, file, code
        self.inputs, self.outputs = signature.inputs, signature.outputs
        self.dimensions, self.variants = signature.dimensions, signature.variants
        self._parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._libraries = {own.sizes: Library(executable, own.signature, entry=own.name) for own in signature.variants}

    @property
    def report(self) -> OpenReport:
        return OpenReport(dimensions=self.dimensions, variants=self.variants)

    def __getitem__(self, name: str) -> Callable[..., OpenModule]:
        if name != "default":
            raise InputError(f"the library has no entry {name!r}.", 'use lib["default"](device), or lib.variant(sizes)')
        return lambda device=None: OpenModule(self, device)

    def variant(self, *sizes: int) -> Library:
        """The variant for ``sizes``, one for each open dimension, as a library; raises InputError where there is none.

        It shares code and constants with this one, and cannot be exported by itself.
        """
        return self._libraries[variant_of(self.variants, self.dimensions, sizes).sizes]

    def name_of(self, sizes: Sequence[int]) -> str:
        """The name of the variant for ``sizes``; raises InputError where there is none."""
        return variant_of(self.variants, self.dimensions, sizes).name

    def vm(self, device: tvm.runtime.Device | None = None) -> ThreadSafeMachine:
        """A Relax VirtualMachine with a function for each variant, by its name; as `Library.vm`."""
        return self._libraries[self.variants[0].sizes].vm(device)

    def parts(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """As `parts_of`: the sizes of the variants that run ``sizes``, in order."""
        key = tuple(sizes)
        if key not in self._parts:
            self._parts[key] = parts_of(self.dimensions, self.variants, key)
        return self._parts[key]

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The size of each open dimension, as inputs of ``shapes`` have it."""
        return tuple(
            next(
                (
                    int(shapes[spec.name][axis])
                    for spec in self.inputs
                    for axis, name in enumerate(spec.shape or ())
                    if name == dimension.name
                ),
                dimension.sizes[0],  # the one that it has
            )
            for dimension in self.dimensions
        )

    def export_library(self, path: str | Path) -> None:
        """Write one shared library with all variants, as `Library.export_library` does with one."""
        if self._file is not None:
            export_again(self._file[0], path, self._file[1])
            return
        signature = OpenSignature(
            inputs=self.inputs, outputs=self.outputs, dimensions=self.dimensions, variants=self.variants
        )
        metadata = serialise.to_json(signature)
        constant_bytes = sum(own.signature.report.constant_bytes for own in self.variants)
        again = self._code.link_again if self._code is not None else None
        executable, objects = (again(), self._code.objects) if self._code and again else (self.executable, ())
        export_executable(executable, metadata, Path(path), constant_bytes + len(metadata), objects)


def load(path: str | Path) -> Library | OpenLibrary:
    """Load a library that ``export_library`` wrote; raises ExportError where it is not one, or was changed.

    What is loaded is the file as it is now: it may be exported again, changed or deleted afterwards.

    Raises UnsupportedEnvironmentError where it holds CUDA kernels and this machine has no CUDA driver or runtime.
    """
    module, file = load_module(path)
    metadata = metadata_of(module)
    if "variants" in json.loads(metadata):
        return OpenLibrary(module, serialise.from_json(OpenSignature, metadata), file)
    return Library(module, serialise.from_json(Signature, metadata), file)


class OpenModule(InputSetter):
    """A library with open dimensions on one device, for one thread at a time: `GraphModule` for any size.

    A size that no variant has runs in parts, one after the other, the last one padded. Threads that work side by side
    take one each.
    """

    def __init__(self, library: OpenLibrary, device: tvm.runtime.Device | None = None) -> None:
        self.device = device if device is not None else tvm.cpu()
        self.inputs = library.inputs
        self._library = library
        self._modules: dict[tuple[int, ...], GraphModule] = {}
        self._values: dict[str, Array] = {}
        self._ran: GraphModule | None = None  # what has the outputs of a run of one part
        self._outputs: list[Tensor] | None = None
        self._given: GraphModule | None = None  # what has the present values as its inputs
        self._one_thread, self._turns = OneThread(), Turns()

    def _set(self, given: Mapping[Any, Any]) -> None:
        checked = {}
        for key, value in given.items():
            spec = self._spec(key)
            checked[spec.name] = _copied(spec, value)
        if checked:
            self._values.update(checked)
            self._given = None
        for name in checked:
            self._turns.has_set(name)

    def run(self, **inputs: Any) -> None:
        """Run once, after setting ``inputs``.

        Raises InputError for inputs that were never set or whose sizes differ, and for a size that cannot run.
        """
        with self._one_thread:
            if self._ran_as_given(inputs):
                return
            self._set(inputs)
            self._turns.check_inputs()
            self.arguments()
            sizes = self._sizes()
            parts = self._library.parts(sizes)
            if parts == [sizes]:
                self._run_whole(self._module(sizes))
            else:
                self._run_parts(sizes, parts)
            self._turns.has_run()

    def _ran_as_given(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a variant that ran before has run all ``inputs``, arrays: it copies them without questions."""
        if len(inputs) != len(self.inputs) or not all(type(inputs.get(own.name)) is np.ndarray for own in self.inputs):
            return False
        module = self._modules.get(self._library.sizes_of({name: value.shape for name, value in inputs.items()}))
        if module is None or any(inputs[own.name].shape != own.shape for own in module.inputs):
            return False
        module.run(**inputs)
        self._values = {name: np.from_dlpack(module.get_input(name)) for name in inputs}
        self._given = self._ran = module
        for name in inputs:
            self._turns.has_set(name)
        self._turns.has_run()
        return True

    def parts(self) -> list[tuple[int, ...]]:
        """The sizes of the variants that the present inputs run through, in order."""
        return self._library.parts(self._sizes())

    def _sizes(self) -> tuple[int, ...]:
        return self._library.sizes_of({name: own.shape for name, own in self._values.items()})

    def _run_whole(self, module: GraphModule) -> None:
        if self._given is not module:
            module.set_input(**{name: tvm_ffi.from_dlpack(value) for name, value in self._values.items()})
            self._given = module
        module.run()
        self._ran, self._outputs = module, None

    def _run_parts(self, sizes: Sequence[int], parts: Sequence[tuple[int, ...]]) -> None:
        place, dimension = next(
            (place, own) for place, own in enumerate(self._library.dimensions) if own.axes is not None
        )
        assert dimension.axes is not None
        results = []
        for part, own in zip(
            parts, cut(self.arguments(), dimension.axes, [part[place] for part in parts]), strict=True
        ):
            module = self._module(part)
            module.run(**{spec.name: value for spec, value in zip(self.inputs, own, strict=True)})
            results.append([np.from_dlpack(module.get_output(at)) for at in range(module.get_num_outputs())])
        self._outputs = [tvm_ffi.from_dlpack(value) for value in join(results, dimension.axes, sizes[place])]
        self._ran = self._given = None

    def _module(self, sizes: tuple[int, ...]) -> GraphModule:
        if sizes not in self._modules:
            self._modules[sizes] = GraphModule(self._library.variant(*sizes), self.device)
        return self._modules[sizes]

    def get_num_outputs(self) -> int:
        return len(self._library.outputs)

    def get_output(self, index: int = 0, out: Any = None) -> Any:
        """Output ``index`` of the last run, as `GraphModule.get_output` gives it."""
        with self._one_thread:
            self._turns.check_outputs()
            if self._ran is not None:
                return self._ran.get_output(index, out)
            if self._outputs is None:
                raise InputError("there are no outputs yet.", "call run() first")
            result = self._outputs[index]
            if out is None:
                return result
            if not isinstance(out, np.ndarray):
                return result.copyto(out)
            np.copyto(out, np.from_dlpack(result), casting="no")
            return out


def _copied(spec: TensorSpec, value: Any) -> Array:
    value = checked(spec, value)
    return aligned_copy(value if isinstance(value, np.ndarray) else np.from_dlpack(value))
