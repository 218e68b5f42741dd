"""Random quantised operators and chains, to one step of each result: ``python -m tests.support.random_quantised``.

A case is a chain of layers (`draw_layers`), each of which is written twice (`writer`): as a quantiser writes it, and
between DequantizeLinear and QuantizeLinear in float32, which ONNX Runtime computes node by node (`check`).
"""
