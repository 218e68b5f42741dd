"""What this package says about single ONNX operators: one module per family, joined in `tables.py`.

A row is a function under ``@rule("Operator", ...)`` or ``@converter("Operator", ...)`` (`context.py`):

``rule``
    Refuses what ONNX's shape inference does not look at and the stock importer would turn into a wrong answer, or
    writes nodes that convert rightly. Where it writes none, this form of the operator is right as it is.
``converter``
    A Relax converter that takes the place of the stock importer's, or stands where it has none.

Prefer a rule to a converter: its result takes part in constant folding and can be tried with ONNX Runtime.
"""
