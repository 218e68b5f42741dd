"""Registers the plugin with stock TVM: pass pipelines, typed PassContext options, and `tvm.relay` where TVM has none.

`autoload` is the entry point (group ``tvm.backends``) that `import tvm` calls at its end; `import tvm_ext` calls
`register` as well, so that a source checkout which is not installed works the same. Both are cheap, since what is
registered is looked up when it is used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tvm_ext.errors import TvmExtError

MODULE_ALIASES = {
    "tvm.relay": "tvm_ext.relay",
    "tvm.relay.frontend": "tvm_ext.frontend",
    "tvm.contrib.graph_executor": "tvm_ext.runtime.graph_module",
}
"""Modules that older TVMs had, and ours which stand in for them."""

# Whatever goes wrong here must not reach the user of plain TVM; TVM's own loader turns anything else into a warning.
_EXPECTED_FAILURES = (
    TvmExtError,
    ImportError,
    OSError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def autoload() -> None:
    """Register the plugin, or warn why not; never raises. After a refusal `import tvm_ext` raises the reason."""
    try:
        from tvm_ext._environment import check_environment

        check_environment()
        importlib.import_module("tvm_ext.forks").note_threads()
        register()
    except _EXPECTED_FAILURES as error:
        if not is_importing("tvm_ext"):  # else that import is on its way and calls `register` itself
            _forget_package()
        _warn(f"tvm_ext is not available: {error}")


def register() -> None:
    """Register everything, once; a second call does nothing more. Raises what TVM raises where it refuses."""
    from tvm.base import _RUNTIME_ONLY

    register_rammer_runtime()
    if not _RUNTIME_ONLY:  # TVM_USE_RUNTIME_LIB=1: no compiler, hence nothing to register with
        register_pipelines()
        register_codegen()
        register_config_options()
        register_module_aliases()  # last: nothing can fail after it


def register_pipelines() -> None:
    """Register the Relax and TensorIR pipelines of ours; they are built when they are asked for."""
    from tvm_ext import _tvm

    _tvm.register_relax_pipeline(_tvm.PIPELINE_NAME, _relax_pipeline)
    _tvm.register_tir_pipeline(_tvm.PIPELINE_NAME, _tir_pipeline)
    _tvm.register_tir_pipeline(_tvm.CPU_PIPELINE, _cpu_pipeline)
    _tvm.register_tir_pipeline(_tvm.RKERNEL_PIPELINE, _rkernel_pipeline)
    _tvm.register_tir_pipeline(_tvm.ROCM_PIPELINE, _rocm_pipeline)


def register_codegen() -> None:
    """Register what stock RunCodegen calls for regions that `PartitionCutlass` has cut out."""
    from tvm_ext import _tvm

    _tvm.tvm_ffi.register_global_func("relax.ext.tvm_ext.cutlass", _run_codegen, override=True)


def register_config_options() -> bool:
    """Register the typed ``tvm_ext.*`` PassContext options; False where the native part is absent or does not load.

    They are a convenience beside `BuildOptions`, so their absence is not an error; `tvm-ext doctor` reports it.
    """
    from tvm_ext import _native

    return _load(_native.OPTIONS_LIBRARY, "PassContext options are")


def register_rammer_runtime() -> bool:
    """Load the runtime of rTasks, so that libraries which hold schedules can be loaded; False where that fails.

    Its threads are held when Python ends.
    """
    from tvm_ext import _native

    if _native.is_loaded(_native.RUNTIME_LIBRARY):
        return True
    if not _load(_native.RUNTIME_LIBRARY, "runtime of rTasks is"):
        return False
    import atexit

    import tvm_ffi

    atexit.register(tvm_ffi.get_global_func("tvm_ext.rammer.hold_other_threads"))
    return True


def _load(library: str, what: str) -> bool:
    """Load ``library`` once, with a warning where it does not load, and of an old one.

    An old library computes the right things, only slower or without what has come since.
    """
    from tvm_ext import _native

    if _native.is_loaded(library):
        return True
    try:
        loaded = _native.load(library)
    except (OSError, RuntimeError) as error:
        _warn(f"tvm_ext's {what} not available: {error}")
        return False
    problem = _native.outdated(library)
    if problem is not None:
        _warn(f"tvm_ext: {'; '.join(problem)}")
    return loaded


def register_module_aliases() -> None:
    """Let `from tvm import relay`, `import tvm.relay` and `tvm.relay` give `tvm_ext.relay`, imported on first use."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AliasFinder())  # last: a module of TVM's own is found before
    import tvm

    if not hasattr(tvm, "__getattr__"):
        tvm.__getattr__ = _missing_tvm_attribute


def _relax_pipeline(**options: Any) -> Any:
    return importlib.import_module("tvm_ext.pass_pipeline").relax_pipeline(**options)


def _run_codegen(*arguments: Any) -> Any:
    return importlib.import_module("tvm_ext.toolchains.cutlass_codegen").run_codegen(*arguments)


def _tir_pipeline() -> Any:
    return importlib.import_module("tvm_ext.toolchains.tir_pipelines").tir_pipeline()


def _cpu_pipeline() -> Any:
    return importlib.import_module("tvm_ext.toolchains.tir_pipelines").cpu_pipeline()


def _rkernel_pipeline() -> Any:
    return importlib.import_module("tvm_ext.toolchains.tir_pipelines").rkernel_pipeline()


def _rocm_pipeline() -> Any:
    return importlib.import_module("tvm_ext.toolchains.tir_pipelines").rocm_pipeline()


def _missing_tvm_attribute(name: str) -> Any:
    if f"tvm.{name}" in MODULE_ALIASES:
        return importlib.import_module(f"tvm.{name}")
    raise AttributeError(f"module 'tvm' has no attribute {name!r}")


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves the names of `MODULE_ALIASES` to the very module objects they stand for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in MODULE_ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes the entry that a module leaves for itself in sys.modules, not the object it made.
        # `import a.b` asks no finder where `a` is a plain module, so names below this one are entered as well.
        for alias, ours in MODULE_ALIASES.items():
            if alias == module.__name__ or alias.startswith(f"{module.__name__}."):
                sys.modules[alias] = importlib.import_module(ours)


def is_importing(name: str) -> bool:
    """Whether the import of module ``name`` has begun and not ended."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _forget_package() -> None:
    """Drop the half-registered package, so that a later `import tvm_ext` starts afresh and raises the reason."""
    for name in [name for name in sys.modules if name == "tvm_ext" or name.startswith("tvm_ext.")]:
        del sys.modules[name]


def _warn(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # python -W error: even then `import tvm` goes on
        sys.stderr.write(f"warning: {message}\n")
