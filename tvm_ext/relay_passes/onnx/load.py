"""Reads an ONNX model from a file, bytes or protobuf, its external data included, trusting nothing in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from tvm_ext.errors import ModelError

from .graph import all_nodes, nested_graphs

_EXPORT_AGAIN = "check that the file is complete (compare its size or checksum) and export it again"
_TF2ONNX = "TensorFlow's models become ONNX files by `pip install tf2onnx` and `python -m tf2onnx.convert "
_OTHERS = {
    "pb": f"{_TF2ONNX}--graphdef model.pb --inputs NAME:0 --outputs NAME:0 --output model.onnx`",
    "tflite": f"{_TF2ONNX}--tflite model.tflite --output model.onnx`",
    **dict.fromkeys(("pt", "pt2", "pth"), "relay.frontend.from_torch and `tvm-ext compile` read programs of PyTorch"),
}
"""What to do with files of other frameworks, by the end of their names."""


def load_onnx(source: onnx.ModelProto | str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """The model behind `source`: a path, the file's bytes, or a loaded model. A loaded model is returned as it is.

    Raises ModelError where the file is missing, no ONNX or damaged, or its external data lie outside the model's
    folder.
    """
    if isinstance(source, onnx.ModelProto):
        return _checked(source, "the given ModelProto", folder=None)
    if isinstance(source, bytes):
        return _checked(_parse(source, "the given bytes"), "the given bytes", folder=None)
    if not isinstance(source, str | os.PathLike):
        raise ModelError(
            f"a model is a path, bytes or an onnx.ModelProto, not {type(source).__name__}", "pass one of these"
        )
    path = Path(source)
    return _checked(_parse(_read(path), str(path)), str(path), folder=path.parent)


def _read(path: Path) -> bytes:
    if path.is_dir():
        saved = f"{_TF2ONNX}--saved-model {path} --output model.onnx`"
        is_saved = (path / "saved_model.pb").is_file()
        raise ModelError(f"'{path}' is a folder", saved if is_saved else "pass the .onnx file in it")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"the model file '{path}' does not exist", "check the path") from error
    except OSError as error:
        raise ModelError(f"the model file '{path}' cannot be read: {error.strerror}", "check its rights") from error


def _parse(data: bytes, origin: str) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        problem = f"{origin} is no ONNX model, or is truncated or corrupt ({len(data)} bytes)"
        raise ModelError(problem, _remedy(origin)) from error
    return model


def _remedy(origin: str) -> str:
    return _OTHERS.get(origin.rpartition(".")[2], _EXPORT_AGAIN)


def _checked(model: onnx.ModelProto, origin: str, folder: Path | None) -> onnx.ModelProto:
    """A few garbage files parse as an empty protobuf: a model has a graph, an operator set and an output."""
    missing = [
        what
        for what, there in (
            ("graph", model.HasField("graph")),
            ("operator set", bool(model.opset_import)),
            ("output", bool(model.graph.output)),
        )
        if not there
    ]
    if missing:
        raise ModelError(f"{origin} is no ONNX model: it has no {' and no '.join(missing)}", _remedy(origin))
    _check_text(model, origin)
    return _with_external_data(model, origin, folder)


def _check_text(model: onnx.ModelProto, origin: str) -> None:
    """Protobuf hands out a string that is no UTF-8 as bytes, or raises when it is read: here rather than later."""
    try:
        is_text = all(isinstance(text, str) for text in _texts(model))
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ModelError(f"{origin} is corrupt: a name in it is not UTF-8", _remedy(origin))


def _texts(model: onnx.ModelProto) -> Iterator[object]:
    body = model.graph
    yield from (opset.domain for opset in model.opset_import)
    yield from (tensor.name for tensor in body.initializer)
    for value in (*body.input, *body.output):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in all_nodes(body.node):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (item.name for item in node.attribute)


def _tensors(body: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from body.initializer
    for node in all_nodes(body.node):
        for item in node.attribute:
            if item.type == onnx.AttributeProto.TENSOR:
                yield item.t
            yield from item.tensors
        for nested in nested_graphs(node):
            yield from nested.initializer


def _with_external_data(model: onnx.ModelProto, origin: str, folder: Path | None) -> onnx.ModelProto:
    external = [tensor for tensor in _tensors(model.graph) if uses_external_data(tensor)]
    if not external:
        return model
    if folder is None:
        raise ModelError(
            f"{origin} keeps {len(external)} tensors, '{external[0].name}' among them, in files beside the model",
            "pass the path of the .onnx file, or load it with onnx.load",
        )
    for tensor in external:
        _load_external(tensor, folder)
    return model


def _load_external(tensor: onnx.TensorProto, folder: Path) -> None:
    location = external_file(tensor, folder)
    try:
        load_external_data_for_tensor(tensor, str(folder.resolve()))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"the external data of tensor '{tensor.name}' in '{location}' cannot be read: {error}",
            "copy the whole folder of the model, or export it again",
        ) from error
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def external_file(tensor: onnx.TensorProto, folder: Path) -> Path:
    """The file that holds the data of `tensor`.

    Raises ModelError where the location is absolute, leaves `folder` (by `..` or through a symbolic link), or is no
    regular file.
    """
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    remedy = "keep the data files in the model's folder, beside the .onnx file, and no links among them"
    if not location:
        raise ModelError(f"tensor '{tensor.name}' has external data without a location", _EXPORT_AGAIN)
    if Path(location).is_absolute() or "\\" in location or location[1:2] == ":":
        raise ModelError(f"tensor '{tensor.name}' keeps its data at the absolute path '{location}': refused", remedy)
    base = folder.resolve()
    path = (base / location).resolve()
    if not path.is_relative_to(base):
        raise ModelError(
            f"tensor '{tensor.name}' keeps its data in '{location}', outside the model's folder: refused", remedy
        )
    if not path.is_file():
        raise ModelError(f"the data file '{location}' of tensor '{tensor.name}' does not exist", remedy)
    return path
