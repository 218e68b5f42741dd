"""Stages on the graph: ONNX import and Relax passes."""
