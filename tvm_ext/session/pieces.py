"""What runs the pieces of a session's model: variants of ours by shape, or ONNX Runtime; and the report of both."""

from __future__ import annotations

import collections
import importlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import onnx

from tvm_ext.errors import CompileError, IllegalRewrite, InputError, ModelError, UnsupportedEnvironmentError
from tvm_ext.reports.report import BuildReport
from tvm_ext.runtime.batches import cut, join
from tvm_ext.runtime.graph_module import GraphModule, TensorSpec
from tvm_ext.runtime.library import Library
from tvm_ext.runtime.open_library import OpenLibrary, OpenModule
from tvm_ext.support.arrays import Array

from .divisions import DividedRun, Divisions, InputSizes, ModelOf
from .partition import Piece

MOST_VARIANTS = 16
"""Combinations of shapes that a piece is compiled for. Others run in ONNX Runtime, or replace the oldest in use."""

DENORMAL_AS_ZERO = "session.set_denormal_as_zero"
"""ONNX Runtime's configuration entry that means `BuildOptions.flush_denormals`."""

BUILD_ERRORS = (ModelError, InputError, IllegalRewrite, CompileError)
"""What compiling a piece may raise for the model's sake."""

Build = Callable[[onnx.ModelProto, Mapping[str, Sequence[int]]], Library]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceReport:
    """Who runs a piece, why it is not us, how many operators of the model it has, and a build report by shapes.

    ``undivided`` says why batches ran as a whole, each of which is compiled: the operator that mixes elements.
    """

    engine: str  # "tvm_ext" or "onnxruntime"
    reason: str
    operators: int
    builds: tuple[tuple[InputSizes, BuildReport], ...]
    undivided: tuple[str, ...] = ()

    def __str__(self) -> str:
        shapes = [" and ".join("x".join(map(str, shape)) or "scalar" for shape in own) for own, _ in self.builds]
        compiled = f", compiled for {'; '.join(shapes)}" if shapes else ""
        whole = "".join(f"; batches are not divided: {reason}" for reason in self.undivided)
        return f"{self.engine}: {self.operators} operators{compiled}{': ' * bool(self.reason)}{self.reason}{whole}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionReport:
    """The pieces of a session's model, in the order in which they run."""

    pieces: tuple[PieceReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.pieces))


class CompiledVariant:
    """A library; each thread runs a `GraphModule` of its own, which share code and constants."""

    def __init__(self, library: Library | OpenLibrary) -> None:
        self.library = library
        self._own = threading.local()

    @property
    def builds(self) -> tuple[tuple[InputSizes, BuildReport], ...]:
        """The build report of each variant by the shapes of its inputs."""
        library = self.library
        if isinstance(library, OpenLibrary):
            return tuple((_sizes(own.signature.inputs), own.signature.report) for own in library.variants)
        return ((_sizes(library.inputs), library.report),)

    def run(self, feed: Mapping[str, Any]) -> list[Array]:
        """The outputs as arrays that nothing else refers to."""
        module: GraphModule | OpenModule | None = getattr(self._own, "module", None)
        if module is None:
            module = self._own.module = self.library["default"]()
        module.run(**feed)
        return [_as_array(module.get_output(index)) for index in range(len(self.library.outputs))]


def _sizes(specs: Sequence[TensorSpec]) -> InputSizes:
    return tuple(tuple(int(n) for n in spec.shape or () if isinstance(n, int)) for spec in specs)


def _as_array(tensor: Any) -> Array:
    """``tensor`` as an array that may be written to, without a copy where NumPy can."""
    try:
        array: Array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):  # on a GPU, or of a type that NumPy lacks
        copied: Array = tensor.numpy()
        return copied
    return array if array.flags.writeable else array.copy()


class CompiledPiece:
    """A piece that is compiled for each combination of its inputs' shapes when that first comes.

    A batch that `Divisions` may divide runs in parts instead, so that few sizes are compiled.
    """

    def __init__(
        self,
        piece: Piece,
        build: Build,
        model_of: ModelOf,
        *,
        may_fall_back: Callable[[], bool],
        in_runtime: Callable[[Piece, str], RuntimePiece],
    ) -> None:
        self.piece = piece
        self._divisions = Divisions(piece, model_of)
        self._build, self._may_fall_back, self._in_runtime = build, may_fall_back, in_runtime
        self._variants: collections.OrderedDict[InputSizes, CompiledVariant] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._runtime: RuntimePiece | None = None
        self._built = 0

    def report(self) -> PieceReport:
        if self._runtime is not None and not self._variants:
            return self._runtime.report()
        return PieceReport(
            engine="tvm_ext",
            reason="" if self._runtime is None else f"beyond {MOST_VARIANTS} shapes in ONNX Runtime",
            operators=len(self.piece.model.graph.node),
            builds=tuple((shapes, report) for shapes, own in self._variants.items() for _, report in own.builds),
            undivided=tuple(self._divisions.reasons),
        )

    @property
    def uses_onnx_runtime(self) -> bool:
        return self._runtime is not None

    def prepare(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compile for ``shapes``, of all inputs by name, or say why ONNX Runtime runs the piece."""
        self._variant(tuple(tuple(shapes[name]) for name in self.piece.inputs))

    def library_for(self, shapes: Mapping[str, Sequence[int]]) -> Library | None:
        """The library for ``shapes``, of all inputs by name; None where a batch is divided, or ONNX Runtime runs."""
        chosen = self._chosen(tuple(tuple(shapes[name]) for name in self.piece.inputs))
        own = chosen.library if isinstance(chosen, CompiledVariant) else None
        return own if isinstance(own, Library) else None

    def run(self, feed: Mapping[str, Any]) -> list[Array]:
        chosen = self._chosen(tuple(tuple(np.shape(feed[name])) for name in self.piece.inputs))
        if not isinstance(chosen, DividedRun):
            return chosen.run(feed)
        names = self.piece.inputs
        parts = cut([feed[name] for name in names], chosen.axes, chosen.sizes)
        return join(
            [
                self._variant(own).run(dict(zip(names, part, strict=True)))
                for own, part in zip(chosen.shapes, parts, strict=True)
            ],
            chosen.axes,
            chosen.size,
        )

    def _chosen(self, shapes: InputSizes) -> DividedRun | CompiledVariant | RuntimePiece:
        """What runs ``shapes``: parts of the batch where it is divided and not compiled as it is."""
        return self._known(shapes) or self._division(shapes) or self._variant(shapes)

    def _division(self, shapes: InputSizes) -> DividedRun | None:
        with self._lock:
            return None if self._runtime is not None and not self._variants else self._divisions.of(shapes)

    def _known(self, shapes: InputSizes) -> CompiledVariant | None:
        with self._lock:
            known = self._variants.get(shapes)
            if known is not None:
                self._variants.move_to_end(shapes)
            return known

    def _variant(self, shapes: InputSizes) -> CompiledVariant | RuntimePiece:
        known = self._known(shapes)
        if known is not None:
            return known
        with self._lock:  # a second thread with the same new shapes waits for the first one's build
            if shapes in self._variants:
                return self._variants[shapes]
            if self._runtime is not None:
                return self._runtime
            if self._built >= MOST_VARIANTS and self._may_fall_back() and onnx_runtime() is not None:
                warnings.warn(f"ONNX Runtime runs shapes beyond the first {MOST_VARIANTS}", UserWarning, stacklevel=5)
                self._runtime = self._in_runtime(self.piece, f"more than {MOST_VARIANTS} shapes")
                return self._runtime
            try:
                sizes = dict(zip(self.piece.inputs, shapes, strict=True))
                variant = CompiledVariant(self._build(self.piece.model, sizes))
            except BUILD_ERRORS as error:
                if not self._may_fall_back() or onnx_runtime() is None:
                    raise
                warnings.warn(f"ONNX Runtime runs what cannot be compiled: {error.problem}", UserWarning, stacklevel=4)
                self._runtime = self._in_runtime(self.piece, error.problem)
                return self._runtime
            self._variants[shapes] = variant
            self._built += 1
            if len(self._variants) > MOST_VARIANTS:
                self._variants.popitem(last=False)
            return variant


class RuntimePiece:
    """A piece that ONNX Runtime runs, on its CPU provider, with threads that do not spin: the next piece needs them."""

    uses_onnx_runtime = True

    def __init__(self, piece: Piece, reason: str, *, threads: int, flushes: bool = False) -> None:
        self.piece, self._reason = piece, reason
        runtime = onnx_runtime()
        if runtime is None:
            raise UnsupportedEnvironmentError(
                f"ONNX Runtime, which would run what cannot be compiled ({reason}), is not installed",
                "pip install onnxruntime, or export the model with other operators",
            )
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry(DENORMAL_AS_ZERO, str(int(flushes)))
        self._session = runtime.InferenceSession(
            piece.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def report(self) -> PieceReport:
        count = len(self.piece.model.graph.node)
        return PieceReport(engine="onnxruntime", reason=self._reason, operators=count, builds=())

    def run(self, feed: Mapping[str, Any]) -> list[Any]:
        results: list[Any] = self._session.run(list(self.piece.outputs), dict(feed))
        return results


def onnx_runtime() -> ModuleType | None:
    """The package onnxruntime; None where it is not installed."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError:
        return None
