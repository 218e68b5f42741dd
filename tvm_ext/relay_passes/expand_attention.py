"""Relax's operator ``nn.attention`` as the products and the softmax that it stands for.

Importers write attention as these operators, and everything here that looks for attention looks for them: the CPU's one
kernel (`fuse_attention`), templates for products, persistent kernels. Stock TVM legalises the operator whole, to one
function of eleven computations that nothing fuses.
"""

from __future__ import annotations

import math

import numpy as np

from tvm_ext._tvm import Call, Expr, relax
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape

from .rewriting import CallRewriter, call_pass

ATTENTIONS = frozenset({"relax.nn.attention", "relax.nn.attention_bias"})
_CAUSAL = (None, "TopLeft", "BottomRight")


@call_pass("tvm_ext.ExpandAttention")
class ExpandAttention(CallRewriter):
    """Rewrite ``nn.attention`` (with a bias or without, with a causal mask or without) as products and a softmax.

    Left alone: windows that slide, shapes known only at run time, types without a lowest number.
    """

    def rewritten(self, call: Call) -> Expr:
        if operator_name(call) not in ATTENTIONS:
            return call
        shapes = [static_shape(argument) for argument in call.args]
        if None in shapes or call.attrs.window_size is not None or call.attrs.causal_mask not in _CAUSAL:
            return call  # stock TVM's form
        return self._expanded(call)

    def _expanded(self, call: Call) -> Expr:
        """Tensors are (batch, row, head, feature), as the operator has them; products want heads before rows."""
        query, key, value = (self._named(relax.op.permute_dims(argument, [0, 2, 1, 3])) for argument in call.args[:3])
        turned = self._named(relax.op.permute_dims(key, [0, 1, 3, 2]))
        scores = self._named(relax.op.matmul(query, turned))
        scores = self._named(relax.op.multiply(scores, relax.const(self._scale(call), dtype_of(scores))))
        if len(call.args) > 3:
            scores = self._named(relax.op.add(scores, call.args[3]))
        if call.attrs.causal_mask is not None:
            scores = self._causal(scores, str(call.attrs.causal_mask))
        shares = self._named(relax.op.nn.softmax(scores, axis=-1))
        return relax.op.permute_dims(self._named(relax.op.matmul(shares, value)), [0, 2, 1, 3])

    def _named(self, value: Expr) -> Expr:
        return self.builder_.emit(value)

    @staticmethod
    def _scale(call: Call) -> float:
        features = (static_shape(call.args[0]) or ())[-1]
        return 1 / math.sqrt(features) if call.attrs.scale is None else float(call.attrs.scale)

    def _causal(self, scores: Expr, kind: str) -> Expr:
        """Keys behind a query's own place are masked; "BottomRight" counts places from the last ones."""
        queries, keys = (static_shape(scores) or ())[-2:]
        seen = np.tril(np.ones((queries, keys), "bool"), abs(queries - keys) if kind == "BottomRight" else 0)
        lowest = relax.const(float(np.finfo(dtype_of(scores)).min), dtype_of(scores))
        return self._named(relax.op.where(relax.const(seen), scores, lowest))
