"""What a user may ask of a build, as one frozen record, and the only place that reads the environment.

Three ways set an option, the later winning: the defaults below; ``tvm_ext.*`` keys of the current TVM
``PassContext``; arguments of ``relay.build``.

Environment variables
---------------------
``TVM_EXT_CACHE_DIR``
    Folder for measurements that are worth keeping; default: the user's cache folder.
``TVM_EXT_KERNEL_CACHE``
    What ``kernel_cache="auto"`` means: ``off``, a folder, or (unset) the folder ``kernels`` in the one above.
``TVM_EXT_DATABASE``
    What ``database="auto"`` means: ``off``, a file, or (unset) the file ``measurements.db`` in ``TVM_EXT_CACHE_DIR``.
``TVM_EXT_CPU``
    A CPU's row (``tvm-ext devices`` lists them) or row file that stands for this machine's.
``TVM_EXT_NVCC``
    The CUDA compiler to use: a file, or ``off`` for none. Unset: the first that is found in ``CUDA_HOME`` or
    ``CUDA_PATH``, on the ``PATH``, among installed Python packages (`pip install tvm-ext[cuda]`), in /usr/local/cuda.
``TVM_EXT_NVCC_TIME_LIMIT_S``
    Seconds after which one run of a device compiler is stopped; default 60.
``TVM_EXT_IMPORT_LIMITS``
    How large an imported model may be, where ``from_onnx(limits=...)`` says nothing; see `import_limits`.
``TVM_NUM_THREADS``, ``OMP_NUM_THREADS``
    TVM's thread count; respected if set, chosen by `configure_threads` if not.
``TVM_EXT_THREAD_POOL``
    Whose threads share the work of a parallel kernel on CPUs: ``own`` (unset; `thread_pool`) or ``tvm`` (TVM's pool).
``TVM_THREAD_POOL_SPIN_COUNT``
    TVM's own; read, since it says for how long its threads stay awake (`forks`).
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from tvm_ext.core_count import usable_core_count as usable_core_count
from tvm_ext.errors import (
    OptionError,
    check_choice,
    check_fraction,
    check_integer,
    check_switch,
    suggestion,
    wrong_value,
)

CONFIG_PREFIX = "tvm_ext."

_CACHE_VARIABLE = "TVM_EXT_CACHE_DIR"
_KERNEL_CACHE_VARIABLE = "TVM_EXT_KERNEL_CACHE"
_DATABASE_VARIABLE = "TVM_EXT_DATABASE"
_CPU_VARIABLE = "TVM_EXT_CPU"
_NVCC_VARIABLE = "TVM_EXT_NVCC"
_NVCC_TIME_VARIABLE = "TVM_EXT_NVCC_TIME_LIMIT_S"
_NVCC_TIME_LIMIT_S = 60.0  # a choice: one kernel takes nvcc one or two seconds
IMPORT_LIMITS_VARIABLE = "TVM_EXT_IMPORT_LIMITS"
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_THREAD_VARIABLES = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")
_CHOSEN_THREADS_VARIABLE = "TVM_EXT_CHOSEN_NUM_THREADS"
_THREAD_POOL_VARIABLE = "TVM_EXT_THREAD_POOL"
_SPIN_VARIABLE = "TVM_THREAD_POOL_SPIN_COUNT"
_SPIN_COUNT = 300_000  # TVM's own default

_SWITCH = "bool | Literal['auto']"  # the type, as Python keeps it


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """Options of one build.

    Parameters
    ----------
    enable_roller
        True: construct rPrograms and emit kernels from them (paper §3); an operator that is beyond a GPU's 32-bit
        indices, or has no tile that fits, is an error. ``"auto"``: the same, but such an operator is left to stock TVM.
        False: stock TVM's schedules everywhere.
    candidates
        K: how many rPrograms construction keeps per operator, best first (paper §3.2, Figure 8; the paper uses 10).
    epsilon
        The bound ε on padding that construction starts from (paper §3.1: ``(S - N % S) / N <= epsilon``); it grows
        greedily while fewer than K rPrograms are found (§3.4). 0 starts from tiles that divide their axis.
    device
        Row of the device tables, row file or build report to construct for; None: the target's row.
    num_threads
        CPU cores that kernels are divided among; None: as many as this process may use.
    kernel_cache
        Where compiled kernels are kept for later builds: ``"auto"`` (the user's cache folder, or what
        ``TVM_EXT_KERNEL_CACHE`` says), ``"off"``, or a folder.
    layout
        Of what lies between convolutions and poolings on a CPU: ``"NCHW"`` as the model says, ``"NCHWc"`` in blocks of
        channels wherever an operator allows it, ``"auto"`` in blocks where the gain pays for the transforms. On a GPU
        ``"NHWC"`` puts the channels of every half-precision convolution last that matrix units serve, ``"auto"`` only
        where few transposes remain.
    winograd
        On CPUs: 3x3 convolutions of step 1 in Winograd's form, where the model expects that to be faster. ``"auto"``:
        F(2x2, 3x3), whose error is at most twice that of direct sums; ``"fast"``: also F(4x4, 3x3), up to four times;
        ``"off"``: direct sums everywhere (docs/numerics.md).
    precision
        In what float32 products and convolutions by constant weights run on CPUs, with float32 sums: ``"float32"``;
        ``"bfloat16"``: wherever an instruction serves them; ``"auto"``: of those, where the model expects it to be
        faster, and only as many as keep the measured error within ``precision_bound``; ``"bfloat16-emulated"``: as
        ``"bfloat16"`` without the instruction; ``"int8"``: models that are quantised already, as they are.
    precision_bound
        The largest error of an output against float32, relative by norm, which is measured: products are left in
        float32 until it holds. ``"auto"`` needs one; None: nothing is measured.
    check_machine_code
        For CUDA: compile every kernel as it is constructed, and take the next rProgram where the compiler refuses it,
        runs too long or spills registers. It takes a run of the compiler (about a second) for each operator.
    enable_pipelining
        Whether GPU kernels load tiles some iterations before they use them (ALCOP). ``"auto"``: as far ahead as the
        model predicts to pay; True: at least one iteration wherever that is legal; False: nowhere.
    pipelining
        How much of it: ``"full"``, ``"multistage"`` (shared memory only), ``"double"`` (two versions of it only).
    shared_stages
        Versions of tiles in shared memory, 2 to 8; None: the model's choice for each kernel.
    register_stages
        Versions of fragments in registers, 1 to 4; None: the model's choice.
    bulk_copies
        On GPUs of compute capability 9.0 and later: whether pipelines load whole tiles by bulk copies (the TMA engine)
        and mbarriers instead of cp.async, where that is legal. Off until it has been measured on such a GPU.
    enable_persistent_fusion
        Whether chains of products, and attention, become one kernel each whose intermediate values stay close to the
        core (Bolt, §3.1). ``"auto"``: chains where the model predicts a gain, attention wherever legal; True: both
        wherever legal; False: nowhere.
    enable_cutlass
        For CUDA devices of capability 7.5 and later: whether matrix products become kernels of CUTLASS's templates
        (Bolt, §3.2), compiled here by nvcc, some 10 to 35 s each the first time. True: wherever a template serves;
        ``"auto"``: where the models predict it to be faster than a kernel of ours; False: nowhere.
    profile_cutlass
        Whether templates are ranked by measurements. ``"auto"``: by those that the database has; True: unknown ones are
        measured first, where the GPU is (some minutes a model; docs/bolt.md); False: by the model alone.
    database
        Where measurements are kept: ``"auto"`` (the cache folder, or ``TVM_EXT_DATABASE``), ``"off"``, or a file.
    enable_rammer
        On CPUs: whether one schedule runs the rTasks of many operators (Rammer); ``"auto"``: where it should be faster.
    rammer_policy
        By which of `relay_passes.wavefronts.policies` rTasks are given to cores, yours by `register_policy` among them.
    bounds
        What becomes of an index outside its axis, and of an integer divided by 0, that is only known at run time:
        ``"error"`` of ``run`` on CPUs; ``"wrap"``, and on GPUs, the index modulo the extent, and 0.
    flush_denormals
        On CPUs: whether kernels take subnormal numbers for 0 (FTZ and DAZ), in every thread that runs them. Arithmetic
        on them takes some processors many times as long. The caller's own mode is restored by each kernel.

    Raises
    ------
    OptionError
        for a value of the wrong type or outside its range.
    """

    enable_roller: bool | Literal["auto"] = True
    candidates: int = 10
    epsilon: float = 0.0
    device: str | None = None
    num_threads: int | None = None
    kernel_cache: str = "auto"
    layout: Literal["auto", "NCHW", "NCHWc", "NHWC"] = "auto"
    winograd: Literal["auto", "fast", "off"] = "auto"
    precision: Literal["float32", "bfloat16", "auto", "bfloat16-emulated", "int8"] = "float32"
    precision_bound: float | None = None
    check_machine_code: bool = False
    enable_pipelining: bool | Literal["auto"] = "auto"
    pipelining: Literal["full", "multistage", "double"] = "full"
    shared_stages: int | None = None
    register_stages: int | None = None
    bulk_copies: bool = False
    enable_persistent_fusion: bool | Literal["auto"] = "auto"
    enable_cutlass: bool | Literal["auto"] = False
    profile_cutlass: bool | Literal["auto"] = "auto"
    database: str = "auto"
    enable_rammer: bool | Literal["auto"] = False
    rammer_policy: str = "segments"
    bounds: Literal["error", "wrap"] = "error"
    flush_denormals: bool = False

    def __post_init__(self) -> None:
        for switch in (field.name for field in fields(self) if field.type == _SWITCH):
            check_switch(switch, getattr(self, switch))
        check_integer("candidates", self.candidates, minimum=1, maximum=1000)
        check_fraction("epsilon", self.epsilon)
        if self.device is not None and (not isinstance(self.device, str) or not self.device.strip()):
            raise wrong_value("device", self.device, "a device (see `tvm-ext devices`), a row file or None")
        if self.num_threads is not None:
            check_integer("num_threads", self.num_threads, minimum=1, maximum=4096)
        check_choice("bounds", self.bounds, ("error", "wrap"))
        check_choice("layout", self.layout, ("auto", "NCHW", "NCHWc", "NHWC"))
        check_choice("winograd", self.winograd, ("auto", "fast", "off"))
        check_choice("precision", self.precision, ("float32", "bfloat16", "auto", "bfloat16-emulated", "int8"))
        if self.precision_bound is not None:
            check_fraction("precision_bound", self.precision_bound)
        elif self.precision == "auto":
            raise wrong_value("precision_bound", None, "a number: the largest error that precision 'auto' may make")
        for flag in ("check_machine_code", "bulk_copies", "flush_denormals"):
            if not isinstance(getattr(self, flag), bool):
                raise wrong_value(flag, getattr(self, flag), "True or False")
        check_choice("pipelining", self.pipelining, ("full", "multistage", "double"))
        if self.shared_stages is not None:
            check_integer("shared_stages", self.shared_stages, minimum=2, maximum=8)
        if self.register_stages is not None:
            check_integer("register_stages", self.register_stages, minimum=1, maximum=4)
        for place, what in (("kernel_cache", "folder"), ("database", "file")):
            value = getattr(self, place)
            if not isinstance(value, str) or not value.strip():
                raise wrong_value(place, value, f'"auto", "off" or the name of a {what}')

    @property
    def measures_precision(self) -> bool:
        """Whether outputs are compared with those in float32."""
        return self.precision_bound is not None and self.precision not in ("float32", "int8")

    @classmethod
    def create(cls, **values: Any) -> BuildOptions:
        """`BuildOptions` from keyword arguments; an unknown name raises `OptionError` with the nearest known one."""
        return cls().updated(**values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, which are also the ``tvm_ext.*`` keys of a PassContext."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def current(cls, **values: Any) -> BuildOptions:
        """The defaults, overridden by the current PassContext's ``tvm_ext.*`` keys, overridden by ``values``."""
        return cls.from_config(_pass_context_config()).updated(**values)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BuildOptions:
        """The options that a PassContext's ``config`` sets; keys without our prefix are somebody else's."""
        ours = {key: value for key, value in config.items() if key.startswith(CONFIG_PREFIX)}
        return cls.create(**{key.removeprefix(CONFIG_PREFIX): value for key, value in ours.items()})

    def updated(self, **values: Any) -> BuildOptions:
        """A copy with ``values`` in place; an unknown name raises `OptionError` with the nearest known one."""
        known = self.names()
        for name in values:
            if name not in known:
                raise OptionError(f"there is no build option called {name!r}.", suggestion(name, known))
        return replace(self, **values)


def _pass_context_config() -> Mapping[str, Any]:
    from tvm import transform  # importing TVM here keeps this module usable before TVM is loaded

    config: Mapping[str, Any] = transform.PassContext.current().config
    return config


def cache_directory() -> Path:
    """The folder for cached measurements: ``TVM_EXT_CACHE_DIR``, else the user's cache folder. It may not exist yet.

    Raises `OptionError` where ``TVM_EXT_CACHE_DIR`` names something that is not a folder.
    """
    chosen = os.environ.get(_CACHE_VARIABLE, "").strip()
    if not chosen:
        import platformdirs  # not where kernels run with TVM's runtime alone

        return platformdirs.user_cache_path("tvm_ext").absolute()
    return _folder(chosen, f"{_CACHE_VARIABLE} names", "name a folder, or unset it")


def _folder(text: str, what: str, remedy: str) -> Path:
    """The folder called ``text``, which may not exist yet; raises `OptionError` where no folder can have that name."""
    try:
        path = Path(text).expanduser().absolute()
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, a NUL in it, "~nobody"
        raise OptionError(f"{what} {text!r}, which cannot be a folder: {error}.", remedy) from error
    if not stat.S_ISDIR(mode):
        raise OptionError(f"{what} {path}, which is not a folder.", remedy)
    return path


def kernel_cache_directory(setting: str = "auto") -> Path | None:
    """The folder that `BuildOptions.kernel_cache` asks for, which may not exist yet; None where it is switched off.

    None on Windows, too, where it cannot be told that nobody else may write to it.

    Raises `OptionError` where it is something that is not a folder.
    """
    chosen = setting.strip()
    if chosen == "auto":
        chosen = os.environ.get(_KERNEL_CACHE_VARIABLE, "").strip() or "auto"
    if chosen == "off" or not hasattr(os, "geteuid"):
        return None
    if chosen == "auto":
        chosen = str(cache_directory() / "kernels")
    return _folder(chosen, "the kernel cache is", "name a folder, or pass kernel_cache='off'")


def database_file(setting: str = "auto") -> Path | None:
    """The file that `BuildOptions.database` asks for, which may not exist yet; None where there shall be none.

    Raises `OptionError` where it is a folder, or no file can have that name.
    """
    chosen = setting.strip()
    if chosen == "auto":
        chosen = os.environ.get(_DATABASE_VARIABLE, "").strip() or "auto"
    if chosen == "off":
        return None
    what, remedy = "the database of measurements", "name a file, or pass database='off'"
    is_folder = False
    try:
        path = cache_directory() / "measurements.db" if chosen == "auto" else Path(chosen).expanduser().absolute()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, RuntimeError, ValueError) as error:  # too long, a NUL in it, "~nobody"
        raise OptionError(f"{what} is {chosen!r}, which cannot be a file: {error}.", remedy) from error
    if is_folder:
        raise OptionError(f"{what} is {path}, which is a folder.", remedy)
    _folder(str(path.parent), f"{what} is in", remedy)
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaSettings:
    """What the environment says about CUDA compilers. ``nvcc`` "" searches, "off" uses none; ``toolkits`` may exist."""

    nvcc: str
    toolkits: tuple[Path, ...]
    time_limit_s: float


def cuda_settings() -> CudaSettings:
    """The environment's `CudaSettings`; raises `OptionError` for a time limit that is no positive number."""
    text = os.environ.get(_NVCC_TIME_VARIABLE, "").strip()
    try:
        limit = float(text or _NVCC_TIME_LIMIT_S)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit > 0):
        raise OptionError(f"{_NVCC_TIME_VARIABLE} is {text!r}, which is no time.", "set it to a number of seconds")
    folders = [os.environ.get(name, "").strip() for name in _TOOLKIT_VARIABLES]
    return CudaSettings(
        nvcc=os.environ.get(_NVCC_VARIABLE, "").strip(),
        toolkits=tuple(Path(folder).expanduser() for folder in folders if folder),
        time_limit_s=limit,
    )


def recorded_cpu() -> str | None:
    """The row, by name or file, that stands for this machine's (``TVM_EXT_CPU``); None: this machine's own."""
    return os.environ.get(_CPU_VARIABLE, "").strip() or None


def import_limits_text() -> str:
    """What ``TVM_EXT_IMPORT_LIMITS`` says; `import_limits.ImportLimits.current` reads it."""
    return os.environ.get(IMPORT_LIMITS_VARIABLE, "").strip()


def pool_spin_count() -> int:
    """How often a worker of TVM's pool looks for work before it sleeps, as TVM reads ``TVM_THREAD_POOL_SPIN_COUNT``."""
    text = os.environ.get(_SPIN_VARIABLE)
    if text is None:
        return _SPIN_COUNT
    return int(text) if text.strip().isdigit() else 0


def uses_own_threads() -> bool:
    """Whether parallel kernels are to run on this package's threads; raises OptionError for an unknown word."""
    word = os.environ.get(_THREAD_POOL_VARIABLE, "").strip() or "own"
    if word not in ("tvm", "own"):
        raise OptionError(
            f"{_THREAD_POOL_VARIABLE} is {word!r}, which is not a thread pool.", 'set it to "tvm" or "own"'
        )
    return word == "own"


def configure_threads() -> int | None:
    """Let TVM use every core this process may use, unless the user has set a thread count.

    Stock TVM takes half of the logical cores of an x86 machine, one of two. The count is read by TVM when its pool
    starts, at the first parallel kernel, so this must run before. Returns the count set, None where the user's stands.
    The choice is remembered beside it, so that a child process that is pinned to fewer cores chooses anew.
    """
    ours = os.environ.get(_CHOSEN_THREADS_VARIABLE)
    if any(
        os.environ.get(name) not in (None, "", ours if name == _THREAD_VARIABLES[0] else "")
        for name in _THREAD_VARIABLES
    ):
        return None
    count = usable_core_count()
    os.environ[_THREAD_VARIABLES[0]] = os.environ[_CHOSEN_THREADS_VARIABLE] = str(count)
    return count
