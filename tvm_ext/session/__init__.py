"""ONNX Runtime's Python interface over kernels of ours, and an execution provider inside ONNX Runtime itself."""

from .context_model import write_context_model
from .inference_session import InferenceSession, ModelMetadata, NodeArg
from .io_binding import IOBinding
from .pieces import PieceReport, SessionReport
from .provider import library_path, register_execution_provider
from .session_options import SessionOptions

__all__ = [
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "PieceReport",
    "SessionOptions",
    "SessionReport",
    "library_path",
    "register_execution_provider",
    "write_context_model",
]
