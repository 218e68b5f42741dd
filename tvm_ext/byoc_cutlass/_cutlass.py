"""The package ``nvidia-cutlass``: whether it is there and of the right version, its headers, its tracer of epilogues.

What is wrong with importing that package is mended here and nowhere else:

* ``cutlass_cppgen`` imports ``cuda`` and ``pydot``, which tracing does not use. Where they are absent, empty modules
  stand in for them during the import.
* Its module ``backend.compiler`` makes a file ``compiled_cache.db`` in the current folder as it is imported (and fails
  where that cannot be written). An inert one stands in for it: this package compiles with `tvm_ext.toolchains`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from tvm_ext.errors import UnsupportedEnvironmentError

PACKAGE = "nvidia-cutlass"
VERSION = "4.2.0.0"
"""The one version that this room is written for: its headers' static assertions are what `legality` mirrors."""

INSTALL = f"install it with `pip install 'tvm-ext[cutlass]'` (it asks for {PACKAGE}=={VERSION})"

PAIRS = "13_two_tensor_op_fusion"
"""The example that has the templates of two products in one kernel, for whoever compiles them."""

_COMPILER = "cutlass_cppgen.backend.compiler"
_UNUSED = ("pydot", "cuda", "cuda.cuda", "cuda.cudart")


def require() -> None:
    """Raise UnsupportedEnvironmentError, saying what to install, unless the package is there in `VERSION`."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise UnsupportedEnvironmentError(f"the Python package {PACKAGE} is not installed.", INSTALL) from error
    if version != VERSION:
        raise UnsupportedEnvironmentError(f"{PACKAGE} {version} is installed, and {VERSION} is needed.", INSTALL)


def include_folders() -> tuple[Path, ...]:
    """Where CUTLASS's headers are, those of its tools and of its examples beside them; raises as `require`."""
    require()
    spec = importlib.util.find_spec("cutlass_library")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(root) / "source"
        if (source / "include" / "cutlass" / "cutlass.h").is_file():
            examples = source / "examples"
            utilities, own = source / "tools" / "util" / "include", Path(__file__).with_name("stand_ins")
            return source / "include", utilities, examples / PAIRS, examples, own
    raise UnsupportedEnvironmentError(f"{PACKAGE} {VERSION} is installed without its headers.", INSTALL)


@functools.cache
def tracer() -> ModuleType:
    """``cutlass_cppgen.backend.evt``, imported without side effects; raises as `require`."""
    require()
    with _stand_ins():
        return importlib.import_module("cutlass_cppgen.backend.evt")


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Modules in place of what the import must not run or does not find, for as long as it lasts."""
    absent = [name for name in _UNUSED if name not in sys.modules and not _is_there(name.split(".")[0])]
    replaced = [_COMPILER] if _COMPILER not in sys.modules else []
    for name in [*absent, *replaced]:
        sys.modules[name] = _empty_module(name)
    try:
        yield
    finally:
        for name in [*absent, *replaced]:
            sys.modules.pop(name, None)


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _empty_module(name: str) -> ModuleType:
    module = ModuleType(name)
    nothing = type("ArtifactManager", (), {})
    names = ("CUdeviceptr", "CUstream", "CUdevice_attribute", "CUresult", "ArtifactManager", "CompilationOptions")
    vars(module).update(dict.fromkeys(names, nothing), __version__=VERSION, __path__=[])
    return module
