"""`InferenceSession`: ONNX Runtime's class of that name, with kernels that this plugin constructs."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tvm_ext import relay
from tvm_ext.errors import InputError, ModelError, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.relay_passes.batching.prove import ModelAt
from tvm_ext.relay_passes.onnx.bind_inputs import declared_dims
from tvm_ext.relay_passes.onnx.import_model import checked_graph, expand_unsupported
from tvm_ext.relay_passes.onnx.load import load_onnx
from tvm_ext.runtime.graph_module import TensorSpec
from tvm_ext.runtime.library import Library
from tvm_ext.support.shared_constants import ConstantStore, sharing

from .io_binding import IOBinding
from .partition import Piece, other_ends, partition, whole
from .pieces import BUILD_ERRORS, CompiledPiece, CompiledVariant, PieceReport, RuntimePiece, SessionReport, onnx_runtime
from .session_options import SessionOptions, flushes

PROVIDER = "TvmExtExecutionProvider"
TARGETS = {PROVIDER: "llvm", "CPUExecutionProvider": "llvm", "CUDAExecutionProvider": "cuda"}
"""Names of execution providers, and the targets that they mean here."""

_ELEMENT_NAMES = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class NodeArg:
    """An input or output: ``type`` as ``tensor(float)``; in ``shape`` an open dimension is its name or None."""

    name: str
    type: str
    shape: list[int | str | None] | None

    @functools.cached_property
    def dtype(self) -> np.dtype[Any] | None:
        """The NumPy type of ``tensor(float)`` and its like; None for strings and what is no tensor."""
        name = self.type.removeprefix("tensor(").removesuffix(")")  # those of ONNX's own types
        if name in ("string", self.type):
            return None
        dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name.upper()))
        return dtype

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` is an array of this type and shape."""
        if not isinstance(value, np.ndarray) or value.dtype != self.dtype:
            return False
        return self.shape is None or (
            len(self.shape) == value.ndim
            and all(not isinstance(n, int) or n == m for n, m in zip(self.shape, value.shape, strict=True))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMetadata:
    """What the model file says of itself; empty for a library."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)


class InferenceSession:
    """Runs a model as ``onnxruntime.InferenceSession`` does.

    A model of static shapes is compiled at once, one with open dimensions for each combination of shapes when it first
    comes (up to `pieces.MOST_VARIANTS`). A batch that is no power of two runs in parts that are, where a proof finds
    that its elements do not meet. The kernel cache makes later sessions start faster. What the import refuses runs in
    ONNX Runtime, if that is installed; `report` says what, and why. Several threads may call `run` at once.

    Parameters
    ----------
    path_or_bytes
        The path of an ONNX file, its bytes, an ``onnx.ModelProto``, or the path of a library (``.so``) that
        `Library.export_library` or ``tvm-ext compile`` wrote.
    sess_options
        `SessionOptions`, ONNX Runtime's or ours.
    providers
        In order of preference, names as in `TARGETS`, or pairs of a name and its options, which are not looked at.
        The first one counts. None: the CPU.
    enable_fallback
        False: a model that cannot be compiled whole is an error.

    Raises
    ------
    ModelError
        for a damaged model, and for one with unsupported operators where ONNX Runtime may not run them.
    OptionError
        for a provider that is not known here.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes | onnx.ModelProto,
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        enable_fallback: bool = True,
        **other: Any,
    ) -> None:
        if other:
            warnings.warn(f"arguments without a meaning here: {', '.join(other)}", UserWarning, stacklevel=2)
        self._options = sess_options if sess_options is not None else SessionOptions()
        self._target = _target_of(providers)
        self._falls_back = enable_fallback
        self._meta = ModelMetadata()
        self._constants = ConstantStore()
        if isinstance(path_or_bytes, str | os.PathLike) and Path(path_or_bytes).suffix == ".so":
            self._open_library(relay.load(Path(path_or_bytes)))
        else:
            self._open_model(load_onnx(path_or_bytes))

    def _open_library(self, library: Library | relay.OpenLibrary) -> None:
        self._inputs, self._outputs = (list(map(_argument, specs)) for specs in (library.inputs, library.outputs))
        self._pieces: list[CompiledPiece | RuntimePiece] = []
        self._variant: CompiledVariant | None = CompiledVariant(library)

    def _open_model(self, model: onnx.ModelProto) -> None:
        self._variant = None
        self._meta = _metadata(model)
        constants = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [_node_arg(value) for value in model.graph.input if value.name not in constants]
        self._outputs = [_node_arg(value) for value in model.graph.output]
        shapes = {argument.name: self._static_shape(argument) for argument in self._inputs}
        known = {name: shape for name, shape in shapes.items() if shape is not None}
        pieces = self._partition(model)
        if len(known) == len(shapes):
            self._pieces = self._prepared(model, pieces, known)
        else:
            self._pieces = [self._runner(piece) for piece in pieces]

    def _prepared(
        self, model: onnx.ModelProto, pieces: list[Piece], shapes: Mapping[str, Sequence[int]]
    ) -> list[CompiledPiece | RuntimePiece]:
        """What runs a model of known ``shapes``: all of it compiled where that can be, with its control flow."""
        reason = ""
        if any(piece.refused for piece in pieces) and not other_ends(model):
            compiled = self._compiled(whole(model), may_fall_back=lambda: False)
            try:
                compiled.prepare(shapes)
            except BUILD_ERRORS as error:
                reason = error.problem
            else:
                return [compiled]
        made = [self._runner(piece, reason) for piece in pieces]
        if len(made) == 1 and isinstance(made[0], CompiledPiece):
            made[0].prepare(shapes)
        return made

    def _partition(self, model: onnx.ModelProto) -> list[Piece]:
        try:
            pieces = partition(model)
        except ModelError:
            if not self._falls_back or onnx_runtime() is None:
                raise
            operators = tuple(dict.fromkeys(node.op_type for node in model.graph.node))
            return [replace(whole(model), refused=operators)]
        if any(piece.refused for piece in pieces) and (not self._falls_back or onnx_runtime() is None):
            expand_unsupported(checked_graph(model), model)  # raises, naming every operator and its nodes
            if others := sorted(other_ends(model)):
                raise ModelError(
                    f"'{others[0]}' is a sequence or optional value, and a compiled model takes and gives tensors",
                    "pip install onnxruntime and leave enable_fallback, or have the model take and give tensors",
                )
            return [whole(model)]  # control flow, which is compiled for the shapes that come
        return pieces

    def _runner(self, piece: Piece, reason: str = "") -> CompiledPiece | RuntimePiece:
        if not piece.refused:
            return self._compiled(piece, may_fall_back=lambda: self._falls_back)
        return self._in_runtime(piece, f"cannot be compiled: {reason or ', '.join(piece.refused)}")

    def _in_runtime(self, piece: Piece, reason: str) -> RuntimePiece:
        return RuntimePiece(
            piece, reason, threads=int(self._options.intra_op_num_threads), flushes=flushes(self._options)
        )

    def _compiled(self, piece: Piece, may_fall_back: Callable[[], bool]) -> CompiledPiece:
        return CompiledPiece(
            piece,
            self._build,
            lambda size, shapes: ModelAt.of(size, *relay.frontend.from_onnx(piece.model, shape=shapes)),
            may_fall_back=may_fall_back,
            in_runtime=self._in_runtime,
        )

    def _build(self, model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Library:
        mod, params = relay.frontend.from_onnx(model, shape=shapes)
        options = getattr(self._options, "build", None) or BuildOptions.current()
        threads = int(self._options.intra_op_num_threads)
        options = options.updated(num_threads=threads) if threads else options
        options = options.updated(flush_denormals=True) if flushes(self._options) else options
        with sharing(self._constants):
            return relay.build(mod, self._target, params=params, options=options)

    def _static_shape(self, argument: NodeArg) -> tuple[int, ...] | None:
        overrides = getattr(self._options, "free_dimension_overrides", {})
        sizes = [overrides.get(size, size) for size in argument.shape or ()]
        if argument.shape is None or not all(isinstance(size, int) for size in sizes):
            return None
        return tuple(map(int, sizes))  # type: ignore[arg-type]

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """The outputs called ``output_names`` (None or empty: all) as NumPy arrays, which are the caller's.

        Raises InputError for an unknown, a missing or an ill-fitting input, and for an unknown output.
        """
        places = self._places(output_names) if output_names else None
        values = {argument.name: self._checked(argument, input_feed) for argument in self._inputs}
        if len(values) < len(input_feed):
            self._refuse_unknown(input_feed)
        results = self._run(values)
        return results if places is None else [results[place] for place in places]

    def _run(self, values: dict[str, Any]) -> list[Any]:
        if self._variant is not None:
            return self._variant.run(values)
        for piece in self._pieces:
            feed = {name: values[name] for name in piece.piece.inputs}
            values.update(zip(piece.piece.outputs, piece.run(feed), strict=True))
        return [values[argument.name] for argument in self._outputs]

    def _places(self, names: Sequence[str]) -> list[int]:
        known = [argument.name for argument in self._outputs]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InputError(f"there is no output called {unknown[0]!r}.", f"the outputs are: {', '.join(known)}")
        return [known.index(name) for name in names]

    def _refuse_unknown(self, feed: Mapping[str, Any]) -> None:
        known = [argument.name for argument in self._inputs]
        for name in feed:
            if name not in known:
                raise InputError(f"there is no input called {name!r}.", f"the inputs are: {', '.join(known)}")

    def _checked(self, argument: NodeArg, feed: Mapping[str, Any]) -> Any:
        """The value for ``argument``: arrays as they are, others as arrays of its type."""
        if argument.name not in feed:
            raise InputError(f"input {argument.name!r} is missing.", "give every input of get_inputs() a value")
        value = _plain(feed[argument.name])
        if argument.dtype is None or argument.accepts(value):
            return value
        array = value if isinstance(value, np.ndarray) else np.asarray(value, argument.dtype)
        if not argument.accepts(array):
            given = f"{'x'.join(map(str, array.shape)) or 'scalar'} {array.dtype}"
            raise InputError(
                f"input {argument.name!r} is {argument.type} of shape {argument.shape}, but was given {given}.",
                "convert or reshape it",
            )
        return array

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """`run` on ONNX Runtime's OrtValues, giving OrtValues."""
        import onnxruntime

        results = self.run(output_names, input_dict_ort_values)
        return [onnxruntime.OrtValue.ortvalue_from_numpy(result) for result in results]

    def io_binding(self) -> IOBinding:
        """An empty `IOBinding` for `run_with_iobinding`."""
        return IOBinding([argument.name for argument in self._outputs])

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """`run` on what ``iobinding`` has bound."""
        iobinding.take(self.run(iobinding.output_names(), iobinding.feed))

    # ---- questions -------------------------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """The inputs, in the model's order."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the model's order."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Empty: initializers are constants of the kernels."""
        return []

    def get_modelmeta(self) -> ModelMetadata:
        """What the model file says of itself."""
        return self._meta

    def get_session_options(self) -> Any:
        """The options that the session was made with."""
        return self._options

    def get_providers(self) -> list[str]:
        """Ours, and ``CPUExecutionProvider`` where ONNX Runtime runs a piece."""
        beside = any(piece.uses_onnx_runtime for piece in self._pieces)
        return [PROVIDER, *(["CPUExecutionProvider"] if beside else [])]

    def disable_fallback(self) -> None:
        """From now on what cannot be compiled is an error."""
        self._falls_back = False

    def enable_fallback(self) -> None:
        """From now on ONNX Runtime runs what cannot be compiled."""
        self._falls_back = True

    def library_for(self, shapes: Mapping[str, Sequence[int]]) -> Library | None:
        """The library that runs inputs of ``shapes``, all by name; None where it takes several, or ONNX Runtime."""
        if len(self._pieces) == 1 and isinstance(self._pieces[0], CompiledPiece):
            return self._pieces[0].library_for(shapes)
        return None

    @property
    def report(self) -> SessionReport:
        """Which pieces of the model are compiled, for which shapes, with their build reports; what is not, and why."""
        if self._variant is None:
            return SessionReport(pieces=tuple(piece.report() for piece in self._pieces))
        builds = self._variant.builds
        count = sum(own.calls for own in builds[0][1].operators)
        piece = PieceReport(engine="tvm_ext", reason="", operators=count, builds=builds)
        return SessionReport(pieces=(piece,))


def _target_of(providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None) -> str:
    names = [name if isinstance(name, str) else name[0] for name in providers or [PROVIDER]]
    if names[0] not in TARGETS:
        raise OptionError(f"execution provider {names[0]!r} is not known here.", f"one of {', '.join(TARGETS)}")
    return TARGETS[names[0]]


def _plain(value: Any) -> Any:
    """An OrtValue as an array; other values as they are."""
    return value.numpy() if type(value).__name__ == "OrtValue" else value


def _metadata(model: onnx.ModelProto) -> ModelMetadata:
    return ModelMetadata(
        producer_name=model.producer_name,
        graph_name=model.graph.name,
        domain=model.domain,
        description=model.doc_string,
        graph_description=model.graph.doc_string,
        version=model.model_version,
        custom_metadata_map={item.key: item.value for item in model.metadata_props},
    )


def _node_arg(value: onnx.ValueInfoProto) -> NodeArg:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return NodeArg(value.name, str(kind).removesuffix("_type"), None)
    element = value.type.tensor_type.elem_type
    name = "string" if element == onnx.TensorProto.STRING else onnx.helper.tensor_dtype_to_np_dtype(element).name
    return NodeArg(value.name, f"tensor({_ELEMENT_NAMES.get(name, name)})", declared_dims(value))


def _argument(spec: TensorSpec) -> NodeArg:
    shape: list[int | str | None] | None = None if spec.shape is None else list(spec.shape)
    return NodeArg(spec.original_name or spec.name, f"tensor({_ELEMENT_NAMES.get(spec.dtype, spec.dtype)})", shape)
