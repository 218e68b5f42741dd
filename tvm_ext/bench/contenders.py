"""The ways to run one ONNX model that `tvm-ext bench` compares: this plugin, ONNX Runtime, OpenVINO, stock TVM."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tvm_ext import relay
from tvm_ext._tvm import VirtualMachine, import_onnx, tensor, tvm
from tvm_ext.devices.device_db import TargetLike, device_for_target
from tvm_ext.errors import InputError, UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions
from tvm_ext.runtime.graph_module import flatten_outputs
from tvm_ext.support.arrays import Array

from .environment import AFFINITY_KEY, Placement

OURS, ONNX_RUNTIME, STOCK_TVM = "tvm_ext", "onnxruntime", "stock_tvm"
OPENVINO, OPENVINO_BF16 = "openvino_f32", "openvino_bf16"
"""With the precision that it is told to use."""
PEERS = (ONNX_RUNTIME, OPENVINO, STOCK_TVM)
_PACKAGES = {ONNX_RUNTIME: ("onnxruntime", "ONNX Runtime"), OPENVINO: ("openvino", "OpenVINO")}

INSTALL_PEERS = "install it with `pip install 'tvm-ext[bench]'`"

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One built model with its inputs in place. ``run`` computes; ``outputs`` gives the last run's results."""

    name: str
    import_s: float
    build_s: float
    run: Callable[[], None]
    outputs: Callable[[], list[Array]]
    library: relay.Library | None = None  # ours only: holds the build report
    close: Callable[[], str] = str  # ends profiling, where it was asked for, and says in which file it is


def missing_peer(name: str) -> UnsupportedEnvironmentError | None:
    """Why a peer cannot take part here, with the remedy; None where it can. Raises InputError for an unknown name."""
    if name not in PEERS:
        raise InputError(f"there is no peer called {name!r}.", f"the peers are {', '.join(PEERS)}")
    package, title = _PACKAGES.get(name, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        return UnsupportedEnvironmentError(f"comparing with {title} needs it installed.", INSTALL_PEERS)
    return None


def prepare_ours(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    shape: Shapes | None,
    target: TargetLike,
    options: BuildOptions | None,
) -> Contender:
    """Import and build with this plugin. Raises what `relay.frontend.from_onnx` and `relay.build` raise."""
    start = time.perf_counter()
    mod, params = relay.frontend.from_onnx(model, shape=shape)
    imported = time.perf_counter()
    library = relay.build(mod, target, params=params, options=options)
    built = time.perf_counter()
    module = relay.GraphModule(library["default"](tvm.cpu()))
    for index, value in enumerate(inputs.values()):
        module.set_input(index, value)
    return Contender(
        name=OURS,
        import_s=imported - start,
        build_s=built - imported,
        run=module.run,
        outputs=lambda: [module.get_output(i).numpy() for i in range(module.get_num_outputs())],
        library=library,
    )


def prepare_onnx_runtime(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    threads: int,
    placement: Placement | None = None,
    profile_prefix: str | None = None,
) -> Contender:
    """An ONNX Runtime CPU session with all graph optimisations and as many threads as TVM's pool.

    Its workers are bound as ``placement`` says; None leaves them unbound. With ``profile_prefix`` the session notes the
    time of every node, for a file of that name which `Contender.close` completes.
    Raises UnsupportedEnvironmentError where ONNX Runtime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UnsupportedEnvironmentError("this needs ONNX Runtime.", INSTALL_PEERS) from error
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 3
    if placement is not None and placement.worker_cores:
        settings.add_session_config_entry(AFFINITY_KEY, placement.onnx_runtime_affinities)
    if profile_prefix is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = profile_prefix
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    built = time.perf_counter()
    feeds = dict(inputs)
    results: list[list[Array]] = [[]]

    def run() -> None:
        results[0] = session.run(None, feeds)

    return Contender(
        name=ONNX_RUNTIME,
        import_s=0.0,
        build_s=built - start,
        run=run,
        outputs=lambda: results[0],
        close=lambda: str(session.end_profiling()) if profile_prefix is not None else "",
    )


def prepare_openvino(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    threads: int,
    _placement: Placement | None = None,
    name: str = OPENVINO,
) -> Contender:
    """OpenVINO's CPU plugin, told to compute in the type that ``name`` ends with: its own choice depends on the CPU.

    Raises UnsupportedEnvironmentError where OpenVINO is not installed.
    """
    try:
        import openvino
    except ImportError as error:
        raise UnsupportedEnvironmentError("comparing with OpenVINO needs it installed.", INSTALL_PEERS) from error
    settings = {
        "INFERENCE_PRECISION_HINT": name.rpartition("_")[2],
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": "1",
        "PERFORMANCE_HINT": "LATENCY",
    }
    start = time.perf_counter()
    core = openvino.Core()
    read = core.read_model(model.SerializeToString())
    imported = time.perf_counter()
    compiled = core.compile_model(read, "CPU", settings)
    built = time.perf_counter()
    request = compiled.create_infer_request()
    for given, value in inputs.items():
        request.set_tensor(given, openvino.Tensor(np.ascontiguousarray(value)))
    request.infer()  # starts its threads: later ones would share the core to which this thread is bound meanwhile
    return Contender(
        name=name,
        import_s=imported - start,
        build_s=built - imported,
        run=request.infer,
        outputs=lambda: [np.array(request.get_output_tensor(i).data) for i in range(len(compiled.outputs))],
    )


def prepare_stock_tvm(
    model: onnx.ModelProto, inputs: Mapping[str, Array], shape: Shapes | None, target: TargetLike
) -> Contender:
    """Stock TVM as its documentation says: `from_onnx`, `tvm.compile` with its default passes, the Relax VM.

    It gets the target that this plugin resolves ``target`` to, hence the machine's vector instructions too.
    """
    _, resolved = device_for_target(target)
    start = time.perf_counter()
    mod = import_onnx(model, shape_dict={name: list(dims) for name, dims in shape.items()} if shape else None)
    imported = time.perf_counter()
    machine = VirtualMachine(tvm.compile(mod, resolved), tvm.cpu())
    built = time.perf_counter()
    arguments = [tensor(np.ascontiguousarray(value)) for value in inputs.values()]
    results: list[Any] = [None]

    def run() -> None:
        results[0] = machine["main"](*arguments)

    return Contender(
        name=STOCK_TVM,
        import_s=imported - start,
        build_s=built - imported,
        run=run,
        outputs=lambda: [output.numpy() for output in flatten_outputs(results[0])],
    )
