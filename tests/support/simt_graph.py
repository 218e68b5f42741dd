"""A build's kernels in the SIMT interpreter, and CUTLASS's templates by plain C++, as the device of a graph.

The way by which a whole GPU build computes without a GPU: every launch of every kernel as code generation gets it, and
regions through their own host functions, of which the templates alone are stand-ins (`cutlass_on_cpu`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from tvm_ext._tvm import IRModule, Target
from tvm_ext.analysis.launches import DeviceKernel, lower
from tvm_ext.byoc_cutlass.host import HostFunction
from tvm_ext.devices.capabilities import capability_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.arrays import Array
from tvm_ext.support.files import temporary_folder
from tvm_ext.toolchains import cutlass_codegen
from tvm_ext.verify import simt
from tvm_ext.verify.simt.number_types import storage_dtype

from .cutlass_on_cpu import HostLibrary, put_on_cpu


class KernelFault(AssertionError):  # noqa: N818 - what the interpreter found
    """A race, a stray access, or another finding of a kernel."""


class SimtDevice:
    """Runs ``functions`` for ``device`` and, of ``templates``, what they do not have.

    A buffer is an array of its own. Raises KernelFault where the interpreter finds something.
    """

    def __init__(
        self, functions: IRModule, device: DeviceSpec, target: Target, templates: HostLibrary | None = None
    ) -> None:
        self.device, self.target, self.templates = device, target, templates
        self.functions = {gv.name_hint: func for gv, func in functions.functions_items()}
        self._lowered: dict[str, tuple[DeviceKernel, ...]] = {}

    def buffer(self, array: Array) -> Array:
        return np.array(array, order="C")

    def read(self, buffer: Array, shape: Sequence[int], dtype: str) -> Array:
        return buffer.reshape(tuple(shape)).astype(dtype, copy=True)

    def call(self, name: str, buffers: Sequence[Array]) -> None:
        if name not in self.functions:
            assert self.templates is not None, name
            if self.templates.call(name, buffers):
                raise KernelFault(f"{name}: {self.templates.message}")
            return
        if name not in self._lowered:
            self._lowered[name] = lower(self.functions[name].with_attr("global_symbol", "main"), self.target)
        kernels = self._lowered[name]
        tensors = [tensor for tensor in kernels[0].tensors if tensor.name not in kernels[0].workspaces]
        assert len(tensors) == len(buffers), name
        written = simt.written_tensors(kernels)
        arrays = {
            tensor.name: buffer.reshape(tensor.shape).view(storage_dtype(tensor.dtype))
            for tensor, buffer in zip(tensors, buffers, strict=True)
            if tensor.name not in written
        }
        result = simt.run(kernels, arrays, device=self.device)
        if result.findings:
            raise KernelFault(f"{name}: {result.findings[0]}")
        for tensor, buffer in zip(tensors, buffers, strict=True):
            if tensor.name in written:
                buffer[...] = result.outputs[tensor.name].view(buffer.dtype).reshape(buffer.shape)


@contextmanager
def templates_on_cpu() -> Iterator[list[HostLibrary]]:
    """Inside, builds give regions templates of plain C++; their host functions come into the list, a build's last.

    They find a device of the capability that they were built for.
    """
    made: list[HostLibrary] = []
    with temporary_folder("templates") as folder, pytest.MonkeyPatch.context() as patch:
        put_on_cpu(patch, folder)
        patch.setattr(cutlass_codegen.CutlassBackend, "require", lambda _self: None)
        link = cutlass_codegen.link_objects

        def linked(functions: Sequence[HostFunction], kernels: Sequence[bytes], architecture: str) -> bytes:
            code = link(functions, kernels, architecture)
            place = folder / f"linked{len(made)}"
            place.mkdir()
            made.append(HostLibrary.load(code, place))
            for name, number in zip(("major", "minor"), capability_of(architecture), strict=True):
                made[-1].set(name, number)
            return code

        patch.setattr(cutlass_codegen, "link_objects", linked)
        yield made
