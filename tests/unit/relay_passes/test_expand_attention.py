"""``nn.attention`` becomes products and a softmax, and computes what the operator says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext._tvm import structural_equal
from tvm_ext.relay_passes.expand_attention import ExpandAttention

op = relax.op
QUERIES, KEYS, HEADS, FEATURES, VALUES = 5, 7, 2, 8, 6
SHAPES = ((2, QUERIES, HEADS, FEATURES), (2, KEYS, HEADS, FEATURES), (2, KEYS, HEADS, VALUES))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {}, "scaled": {"scale": 0.25}, "top left": {"causal_mask": "TopLeft"},
    "bottom right": {"causal_mask": "BottomRight"},
}  # fmt: skip

BIASED = ("scaled", "bottom right")


def reference(given: list[np.ndarray], scale: float | None = None, causal_mask: str | None = None) -> np.ndarray:
    q, k, v = (item.astype("float64").transpose(0, 2, 1, 3) for item in given[:3])
    scores = q @ k.transpose(0, 1, 3, 2) * (1 / math.sqrt(FEATURES) if scale is None else scale)
    if len(given) > 3:
        scores = scores + given[3]
    if causal_mask is not None:
        place = np.arange(QUERIES)[:, None] + (KEYS - QUERIES if causal_mask == "BottomRight" else 0)
        scores = np.where(np.arange(KEYS) <= place, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (shares / shares.sum(axis=-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


def test_it_computes_what_the_operator_says() -> None:
    """All forms in one module, each recognised as attention by what makes one kernel of it."""
    shapes = [*SHAPES, (2, 1, 1, KEYS)]
    given = inputs_of(*shapes)
    read = {name: 4 if name in BIASED else 3 for name in FORMS}
    made = [op.nn.attention(*given[: read[name]], **form) for name, form in FORMS.items()]
    library = relay.build(module_of(given, relax.Tuple(made)), "llvm", enable_persistent_fusion=True)
    rng = np.random.default_rng(7)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    machine = library.vm()
    found = machine["main"](*map(tvm.runtime.tensor, arrays))
    for result, (name, form) in zip(found, FORMS.items(), strict=True):
        expected = reference(arrays[: read[name]], **form)
        assert np.linalg.norm(result.numpy() - expected) < 1e-5 * np.linalg.norm(expected), name
    assert library.report.persistent is not None
    assert [region.kind for region in library.report.persistent.regions if region.fused] == ["attention"] * len(FORMS)


def test_half_precision_keeps_its_type_and_no_operator_is_left() -> None:
    given = inputs_of(*SHAPES, dtype="float16")
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        mod = ExpandAttention()(module_of(given, op.nn.attention(*given, causal_mask="TopLeft")))
    text = mod.script()
    assert "nn.attention" not in text
    assert "-65504" in text
    assert str(mod["main"].ret_ty.dtype) == "float16"


def test_sliding_windows_and_unknown_extents_stay() -> None:
    given = inputs_of(*SHAPES)
    windowed = module_of(given, op.nn.attention(*given, causal_mask="TopLeft", window_size=3))
    rows = tvm.tirx.Var("rows", "int64")
    unknown = [relax.Var(name, relax.TensorType((1, rows, 2, 8), "float32")) for name in "qkv"]
    for mod in (windowed, module_of(unknown, op.nn.attention(*unknown))):
        assert structural_equal(ExpandAttention()(mod), mod)


def test_other_graphs_stay_as_they_are() -> None:
    (x,) = inputs_of((4, 4))
    mod = module_of([x], op.nn.softmax(op.matmul(x, x)))
    assert structural_equal(ExpandAttention()(mod), mod)
