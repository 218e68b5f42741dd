"""Which of the stock importer's conversions are used; `tests/support/torch_operators.py` compares each with torch.

Others are wrong for some operands: they ignore arguments, dtypes or indices from an axis's end.
"""

from __future__ import annotations

_NAMES = (
    "argsort convolution cumprod expm1 hardsigmoid hardswish index_put "
    "log10 log1p log2 prelu scatter.src "
    "scatter.value softplus softsign sort topk upsample_bicubic2d.vec upsample_bilinear2d.vec"
)
TRUSTED = frozenset(name if "." in name else f"{name}.default" for name in _NAMES.split())

KEPT = (
    "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d batch_norm gru.input group_norm "
    "hardsigmoid hardswish layer_norm linear lstm.input matmul pixel_shuffle rnn_relu.input rnn_tanh.input "
    "scaled_dot_product_attention upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec"
)
"""Operators that torch would take apart, and that are worth more whole."""


def kept_operators() -> list[tuple[str, str]]:
    """Packet and overload of each of `KEPT`."""
    pairs = (name.partition(".") for name in KEPT.split())
    return [(packet, overload or "default") for packet, _, overload in pairs]
