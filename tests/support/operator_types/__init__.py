"""Each ONNX operator with each number type that its schema permits: right, or refused by an error of ours."""
