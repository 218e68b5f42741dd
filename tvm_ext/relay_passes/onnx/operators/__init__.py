"""What this package says about single ONNX operators: one module per family, joined in `tables.py`.

A family module defines any of four tables, all keyed by operator name (standard domain):

``CHECKS``
    What ONNX's shape inference does not look at and the stock importer would turn into a wrong answer. A check raises.
``RULES``
    Rewrites a node into nodes that convert rightly; None: this form of the operator is right as it is.
``CONVERTERS``
    Relax converters that take the place of the stock importer's, or stand where it has none.
``REPLACED``
    The operators for which a rule always answers, so that they need no converter.

Prefer a rule to a converter: its result takes part in constant folding and can be tried with ONNX Runtime.
"""
