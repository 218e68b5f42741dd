"""The execution provider inside ONNX Runtime: registers its library, and compiles what ONNX Runtime hands over.

The library (``csrc/onnxruntime``) describes a graph as values; here they become an ONNX model again, which an
`InferenceSession` of ours compiles. It calls compiled kernels itself, and Python for shapes that are new to it.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import helper

from tvm_ext import _native
from tvm_ext.errors import ModelError, OptionError, UnsupportedEnvironmentError, suggestion
from tvm_ext.options import BuildOptions
from tvm_ext.support.tensors import array_over, tensor_of

from .inference_session import PROVIDER, InferenceSession
from .partition import claimable, importable_with_loops
from .pieces import onnx_runtime
from .session_options import SessionOptions

_OF_ATTRIBUTE = {
    "ints": onnx.AttributeProto.INTS,
    "floats": onnx.AttributeProto.FLOATS,
    "strings": onnx.AttributeProto.STRINGS,
}


def library_path() -> str:
    """The provider's library, for ONNX Runtime in other languages. Raises UnsupportedEnvironmentError without one."""
    path = _native.library_path(_native.PROVIDER_LIBRARY)
    if path is None:
        raise UnsupportedEnvironmentError(
            "this installation has no execution provider for ONNX Runtime.",
            "it is compiled on Linux alone, when tvm_ext is installed with a C++ compiler",
        )
    return str(path)


def register_execution_provider() -> list[Any]:
    """Make ONNX Runtime (1.23 or later) know ``TvmExtExecutionProvider``, and give its devices.

    For ``SessionOptions.add_provider_for_devices(devices, options)``; ``options`` are names and values of
    `BuildOptions`. A second call only gives the devices.

    Raises UnsupportedEnvironmentError without ONNX Runtime, with one before 1.23, or where the library is missing.
    """
    runtime = onnx_runtime()
    if runtime is None or not hasattr(runtime, "register_execution_provider_library"):
        raise UnsupportedEnvironmentError(
            "execution providers in libraries of their own need ONNX Runtime 1.23 or later.",
            "pip install --upgrade onnxruntime",
        )
    path = library_path()
    tvm_ffi.register_global_func("tvm_ext.onnxruntime.check", _check, override=True)
    tvm_ffi.register_global_func("tvm_ext.onnxruntime.claim", _claim, override=True)
    tvm_ffi.register_global_func("tvm_ext.onnxruntime.compile", _compile, override=True)
    devices = _devices(runtime)
    if not devices:
        runtime.register_execution_provider_library(PROVIDER, path)
        devices = _devices(runtime)
    return devices


def _devices(runtime: Any) -> list[Any]:
    return [device for device in runtime.get_ep_devices() if device.ep_name == PROVIDER]


def build_options(texts: Mapping[str, str]) -> BuildOptions:
    """Options of a build from the provider's, whose values are texts; raises OptionError for what is none."""
    for name in texts:
        if name not in BuildOptions.names():
            raise OptionError(f"{PROVIDER} has no option {name!r}.", suggestion(name, BuildOptions.names()))
    values: dict[str, Any] = {}
    for name, text in texts.items():
        values[name] = text
        with contextlib.suppress(json.JSONDecodeError):  # a word, such as "auto"
            values[name] = json.loads(text.lower() if text in ("True", "False") else text)
    return BuildOptions.current(**values)


def _check(options: Any) -> None:
    build_options(_texts(options))


def _claim(description: Any, _options: Any) -> list[list[int]]:
    """Groups of nodes, by their places, that are compiled; none where the model is damaged or nothing is supported."""
    try:
        model = _model(description)
        ends = (*description["inputs"], *description["outputs"])
        others = {str(name) for name, element, _ in ends if element in (0, onnx.TensorProto.STRING)}
        whole = not others and importable_with_loops(model)
        return [list(range(len(model.graph.node)))] if whole else claimable(model, others)
    except ModelError as error:
        warnings.warn(f"ONNX Runtime runs what cannot be compiled: {error.problem}", UserWarning, stacklevel=1)
        return []


def _compile(description: Any, options: Any) -> Callable[[Any], Any]:
    """What gives the function of tensors for the shapes of all inputs."""
    session = InferenceSession(_model(description, fused=True), SessionOptions(build=build_options(_texts(options))))

    def prepare(shapes: Any) -> Any:
        sizes = {arg.name: tuple(map(int, shape)) for arg, shape in zip(session.get_inputs(), shapes, strict=True)}
        library = session.library_for(sizes)
        if library is not None:
            return library.vm(tvm.cpu()).module[library.entry]
        return tvm_ffi.convert(lambda *tensors: _run(session, tensors))

    return prepare


def _run(session: InferenceSession, tensors: Sequence[Any]) -> list[Any]:
    """A run of a session that is not one library: a batch in parts, or a piece in ONNX Runtime."""
    feed = {arg.name: array_over(tensor) for arg, tensor in zip(session.get_inputs(), tensors, strict=True)}
    return [tensor_of(result) for result in session.run(None, feed)]


def _texts(options: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in options.items()}


# ---- ONNX Runtime's graph as a model -------------------------------------------------------------------------------


def _model(description: Any, *, fused: bool = False) -> onnx.ModelProto:
    """The model of a description that ``csrc/onnxruntime/graph.h`` explains.

    An initializer that is an input of a ``fused`` node may change from run to run, and one of an older model may not.
    """
    opsets = [helper.make_opsetid(str(domain), int(version)) for domain, version in description["opsets"]]
    return helper.make_model(_graph("main", description, fused=fused), opset_imports=opsets)


def _graph(name: str, description: Any, *, fused: bool = False) -> onnx.GraphProto:
    given = set(_names(item[0] for item in description["inputs"])) if fused else set()
    constants = [_tensor(item) for item in description["initializers"] if str(item[0]) not in given]
    names = {tensor.name for tensor in constants}
    return helper.make_graph(
        [_node(item) for item in description["nodes"]],
        name,
        [_value(item) for item in description["inputs"] if str(item[0]) not in names],
        [_value(item) for item in description["outputs"]],
        constants,
    )


def _node(item: Any) -> onnx.NodeProto:
    operator, domain, name, inputs, outputs, attributes, graphs = item
    node = helper.make_node(str(operator), _names(inputs), _names(outputs), str(name), domain=str(domain))
    node.attribute.extend(_attribute(str(key), value) for key, value in attributes.items() if value is not None)
    node.attribute.extend(helper.make_attribute(str(key), _graph(str(key), value)) for key, value in graphs.items())
    return node


def _names(items: Iterable[Any]) -> list[str]:
    return [str(item) for item in items]


def _attribute(name: str, value: Any) -> onnx.AttributeProto:
    if isinstance(value, int | float | bytes):
        return helper.make_attribute(name, bytes(value) if isinstance(value, bytes) else value)
    first, *rest = value
    if first == "":
        return helper.make_attribute(name, _tensor(value))
    items = [str(item) if first == "strings" else item for item in rest[0]]
    return helper.make_attribute(name, items, attr_type=_OF_ATTRIBUTE[str(first)])


def _tensor(item: Any) -> onnx.TensorProto:
    name, element, sizes, data = item
    raw = bytes(data) if isinstance(data, bytes) else np.from_dlpack(data).tobytes()
    return onnx.TensorProto(name=str(name), data_type=int(element), dims=[int(n) for n in sizes], raw_data=raw)


def _value(item: Any) -> onnx.ValueInfoProto:
    """The declaration of a tensor, of any rank without sizes. `_claim` takes no node of what is no tensor."""
    name, element, sizes = item
    shape = None if sizes is None else [int(size) if size > 0 else None for size in sizes]
    return helper.make_tensor_value_info(str(name), int(element) or onnx.TensorProto.FLOAT, shape)
