"""ONNX Runtime's Python interface over kernels of ours: `InferenceSession`, so that a user changes one import."""

from .inference_session import InferenceSession, ModelMetadata, NodeArg, SessionOptions
from .io_binding import IOBinding
from .pieces import PieceReport, SessionReport

__all__ = [
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "PieceReport",
    "SessionOptions",
    "SessionReport",
]
