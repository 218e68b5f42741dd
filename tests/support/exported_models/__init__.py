"""Networks of other people's making: torch modules with random weights, exported to ONNX, built and compared.

`networks` makes the modules, `export` writes their ONNX files, `check` builds one and compares it with ONNX Runtime;
`python -m tests.support.exported_models` does all of it, each step in a process of its own. The extra ``models``
brings what is needed.
"""
