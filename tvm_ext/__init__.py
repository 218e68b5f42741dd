"""Roller's kernel construction for stock TVM: ONNX in, constructed kernels out.

>>> from tvm_ext import relay
>>> mod, params = relay.frontend.from_onnx(model)  # doctest: +SKIP
>>> lib = relay.build(mod, "llvm", params=params)  # doctest: +SKIP

Importing this package checks the environment (`errors.UnsupportedEnvironmentError`), sets TVM's thread count unless
the user has, imports TVM and registers the plugin with it. `relay`, the passes and
`InferenceSession` are imported when first used.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from tvm_ext import _autoload, _environment, options
from tvm_ext.errors import TvmExtError
from tvm_ext.options import BuildOptions

if TYPE_CHECKING:
    from tvm_ext import relay
    from tvm_ext.session import InferenceSession, SessionOptions, register_execution_provider, write_context_model

__version__ = "0.1.0"
__all__ = [
    "BuildOptions",
    "InferenceSession",
    "SessionOptions",
    "TvmExtError",
    "__version__",
    "register_execution_provider",
    "relay",
    "write_context_model",
]

_LAZY_MODULES = ("relay",)
_OF_SESSIONS = ("InferenceSession", "SessionOptions", "register_execution_provider", "write_context_model")


def _start() -> None:
    """Check, then register. When TVM itself is importing us, its entry point `_autoload.autoload` does both."""
    options.configure_threads()
    if _autoload.is_importing("tvm"):
        return
    _environment.check_environment()
    collects = gc.isenabled()
    gc.disable()  # a tenth of the time of the import, which makes 300,000 objects that stay
    try:
        import tvm  # noqa: F401 - runs the entry point where the plugin is installed
    finally:
        if collects:
            gc.enable()
    _autoload.register()


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"tvm_ext.{name}")
    if name in _OF_SESSIONS:
        return getattr(importlib.import_module("tvm_ext.session"), name)
    raise AttributeError(f"module 'tvm_ext' has no attribute {name!r}")


_start()
