"""Networks of the papers, written node by node with random or packaged weights; `models` has them by name.

Start at `graph.GraphWriter`. `python -m benchmarks.networks lstm_tc -o lstm_tc.onnx` writes one to a file.
"""
