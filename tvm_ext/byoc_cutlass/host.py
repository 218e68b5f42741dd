"""Host functions that a model's bytecode calls: tensors of tvm-ffi in, one launch of a template's kernel.

Each region has one, ``__tvm_ffi_NAME``, in tvm-ffi's calling convention; all of a model's are one file of C++, which
any compiler makes an object of in a moment. Tensors are the region's parameters and, last, its result; the stream is
the current one of the tensors' device, the workspace is taken from CUDA's pool in the order of that stream. Nothing
runs when the library is loaded, so that a machine without a GPU can load it; what cannot run is an error that says why.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_ext.devices.capabilities import architecture_suffix, capability_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """The structure that a launch is told: ``name``, its ``declaration`` in C, and its numbers as Python packs them.

    Behind the numbers come the factors' addresses, the operands', with ``has_distances`` those between neighbouring
    products of a batch, and the result's.
    """

    name: str  # "GemmCall"
    declaration: str
    packing: str  # of `struct`: "9q4i"
    has_distances: bool = False

    @property
    def once(self) -> str:
        """The declaration for a text that may be compiled together with others."""
        return once(f"{self.name.removesuffix('Call').upper()}_CALL", self.declaration)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """A launch: the entry points that begin with ``symbol``, and what they are told.

    ``factors`` and ``operands`` are places among the region's tensors; operands are in the epilogue's order.
    """

    symbol: str
    form: CallForm
    numbers: tuple[int, ...]
    factors: tuple[int, ...] = ()
    operands: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()

    @property
    def fields(self) -> str:
        """C text that initialises the structure in a host function."""
        factors = [f"data[{tensor}]" for tensor in self.factors]
        rest = ["operands", *(["distances"] if self.form.has_distances else []), "data[tensors - 1]"]
        return ", ".join([*map(str, self.numbers), *factors, *rest])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFunction:
    """The host function ``name`` of ``tensor_count`` tensors, whose addresses are multiples of ``alignment_bytes``."""

    name: str
    tensor_count: int
    call: KernelCall
    alignment_bytes: int = 16


def once(name: str, text: str) -> str:
    """C++ that several sources begin with, so that they can be compiled as one."""
    return f"#ifndef TVM_EXT_{name}\n#define TVM_EXT_{name}\n{text}#endif\n"


def own_header(name: str) -> str:
    """`once` of the C++ in ``<name>.cuh`` beside this module, as it is when this package is imported."""
    return once(name.upper(), f"\n{_text(f'{name}.cuh')}")


@functools.cache
def _text(name: str) -> str:
    """C++ of ours that lies beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def emit_host(functions: Sequence[HostFunction], architecture: str) -> str:
    """C++ of all ``functions``, whose kernels are machine code for ``architecture``."""
    calls = [function.call for function in functions]
    structures = dict.fromkeys(call.form.declaration for call in calls)
    kernels = dict.fromkeys((call.symbol, call.form.name) for call in calls)
    declared = "\n".join(
        f'extern "C" int64_t {symbol}_workspace_bytes({structure} const*);\n'
        f'extern "C" int32_t {symbol}({structure} const*, void*, int64_t, void*);'
        for symbol, structure in kernels
    )
    major, minor = capability_of(architecture)
    exact = architecture_suffix(architecture).endswith("a")
    text = _text("host.h")
    for mark, value in (
        ("@structures@", "\n".join(structures)),
        ("@kernels@", declared),
        ("@architecture@", architecture),
        ("@fits@", f"major == {major} && minor {'==' if exact else '>='} {minor}"),
    ):
        text = text.replace(mark, value)
    return text + "\n".join(map(_function, functions))


def _function(function: HostFunction) -> str:
    call = function.call
    operands = ", ".join([*(f"data[{tensor}]" for tensor in call.operands), "nullptr"])
    distances = ", ".join([*map(str, call.distances), "0"])
    return f"""
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_{function.name}(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny*) {{
  constexpr int tensors = {function.tensor_count};
  void* data[tensors];
  tvm_ext::Launch launch("{function.name}");
  if (!launch.begin(args, count, tensors, {function.alignment_bytes}, data)) return -1;
  void const* const operands[] = {{{operands}}};
  int64_t const distances[] = {{{distances}}};
  {call.form.name} const call = {{{call.fields}}};
  if (!launch.allocate({call.symbol}_workspace_bytes(&call))) return -1;
  return launch.end({call.symbol}(&call, launch.workspace, launch.workspace_bytes, launch.stream));
}}
"""
