"""ONNX's own backend tests, run through the plugin and through stock TVM."""
