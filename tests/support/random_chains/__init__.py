"""Random chains of ONNX operators around a product, window or reduction, against ONNX Runtime.

Where `random_operators` asks whether an operator is right, this asks whether it stays right beside its neighbours:
most epilogues there keep the shape of what they follow, and few here do.
"""
