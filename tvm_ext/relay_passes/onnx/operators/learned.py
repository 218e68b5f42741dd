"""Operators of the domain ai.onnx.ml (linear models, trees of decisions, scaling) in ONNX's own operators.

What ONNX leaves open follows ONNX Runtime. Labels and keys are numbers; texts are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from tvm_ext.support.arrays import Array

from .context import BOOL, DOUBLE, FLOAT, INT64, Pen, learned

_MOST_KEYS = 4096  # a choice: a LabelEncoder compares each element with each key


@learned("Scaler")
def _scaler(pen: Pen) -> None:
    offset, scale = (_floats(pen, name, default) for name, default in (("offset", [0.0]), ("scale", [1.0])))
    pen.add("Mul", pen.add("Sub", _real(pen), pen.constant(offset)), pen.constant(scale), out=pen.out)


@learned("Normalizer")
def _normalizer(pen: Pen) -> None:
    """Rows over their maximum, sum of magnitudes or Euclidean norm; rows whose norm is 0 stay as they are."""
    kind = pen.text("norm", "MAX")
    x = _real(pen)
    norm = pen.reduce({"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}[kind], x, -1, keepdims=True)
    zero, one = (pen.constant(value, np.float32) for value in (0.0, 1.0))
    pen.add("Div", x, pen.add("Where", pen.add("Equal", norm, zero), one, norm), out=pen.out)


@learned("Binarizer")
def _binarizer(pen: Pen) -> None:
    over = pen.add("Greater", pen.x, pen.like(float(pen.attribute("threshold", 0.0))))
    pen.cast(over, pen.known_type(pen.x), out=pen.out)


@learned("Imputer")
def _imputer(pen: Pen) -> None:
    """Elements that equal the one replaced, NaN among them, become those imputed: one for all, or one a column."""
    suffix = "floats" if pen.known_type(pen.x) in (FLOAT, DOUBLE) else "int64s"
    wanted = pen.attribute(f"replaced_value_{suffix.removesuffix('s')}", 0)
    values = pen.constant(pen.attribute(f"imputed_value_{suffix}", []), pen.dtype(pen.x))
    missing = pen.add("IsNaN", pen.x) if np.isnan(wanted) else pen.add("Equal", pen.x, pen.like(wanted))
    pen.add("Where", missing, values, pen.x, out=pen.out)


@learned("ArrayFeatureExtractor")
def _array_feature_extractor(pen: Pen) -> None:
    pen.add("Gather", pen.x, pen.add("Reshape", pen.input[1], pen.integers(-1)), out=pen.out, axis=-1)


@learned("LabelEncoder")
def _label_encoder(pen: Pen) -> None:
    """The value of the first key that equals an element, or the default."""
    keys, values = (_numbers(pen, side) for side in ("keys", "values"))
    if keys.size > _MOST_KEYS or keys.shape != values.shape:
        raise pen.refusal(f"has {keys.size} keys and {values.size} values", f"up to {_MOST_KEYS} of each are encoded")
    if np.isnan(keys.astype(np.float64)).any():
        raise pen.refusal("has a key that is NaN", "impute missing elements before")
    kind, unknown = ("float", 0.0) if values.dtype.kind == "f" else ("int64", -1)
    tensor = pen.attribute("default_tensor", None)
    other = pen.attribute(f"default_{kind}", unknown) if tensor is None else numpy_helper.to_array(tensor)
    deep = pen.add("Concat", pen.add("Shape", pen.x), pen.integers(1), axis=0)
    equal = pen.add("Equal", pen.add("Reshape", pen.x, deep), pen.constant(keys))
    whole = pen.cast(equal, INT64)
    place = pen.add("ArgMax", whole, axis=-1, keepdims=0)
    found = pen.cast(pen.reduce("ReduceMax", whole, -1), BOOL)
    default = pen.constant(np.asarray(other, values.dtype).reshape(()))
    pen.add("Where", found, pen.add("Gather", pen.constant(values), place), default, out=pen.out)


@learned("LinearRegressor")
def _linear_regressor(pen: Pen) -> None:
    _post_transformed(pen, _linear(pen, pen.integer("targets", 1)), pen.out)


@learned("LinearClassifier")
def _linear_classifier(pen: Pen) -> None:
    labels = _labels(pen, "classlabels_ints")
    weights = _floats(pen, "coefficients", [])
    count = max(1, len(_floats(pen, "intercepts", [])) or len(labels))
    scores = _linear(pen, count)
    assert weights.size % count == 0, "the checker of a model sees to it"
    if count > 1:
        _choose(pen, scores, labels)
        _post_transformed(pen, scores, pen.result(1))
        return
    pair = labels if len(labels) == 2 else np.asarray([0, 1], np.int64)
    positive = pen.cast(pen.add("Greater", scores, pen.constant(0.0, np.float32)), INT64)
    pen.add("Gather", pen.constant(pair), pen.reduce("ReduceMax", positive, -1), out=pen.out)
    if pen.result(1):
        _both_classes(pen, scores, probable=True)


@learned("TreeEnsembleRegressor")
def _tree_ensemble_regressor(pen: Pen) -> None:
    count = pen.integer("n_targets", 1)
    kind = pen.text("aggregate_function", "SUM")
    leaves = _leaves(pen, "target", count)
    operator = {"SUM": "ReduceSum", "AVERAGE": "ReduceMean", "MIN": "ReduceMin", "MAX": "ReduceMax"}[kind]
    scores = pen.reduce(operator, leaves, 1)
    _post_transformed(pen, _with_base(pen, scores), pen.out)


@learned("TreeEnsembleClassifier")
def _tree_ensemble_classifier(pen: Pen) -> None:
    """Two classes of which leaves weigh one alone are one score; its sign, or 0.5 for probabilities, decides.

    Where leaves weigh both of two classes, ONNX Runtime gives 1 for a positive score of the second and 0 otherwise,
    whatever the labels are. So does this.
    """
    labels, zero = _labels(pen, "classlabels_int64s"), pen.constant(0.0, np.float32)
    ids = set(pen.numbers("class_ids", ()))
    if len(labels) != 2 or len(ids) != 1:
        scores = _with_base(pen, pen.reduce("ReduceSum", _leaves(pen, "class", len(labels)), 1))
        if len(labels) == 2:
            positive = pen.add("Greater", pen.add("Gather", scores, pen.constant(1, np.int64), axis=-1), zero)
            pen.cast(positive, INT64, out=pen.out)
        else:
            _choose(pen, scores, labels)
        _post_transformed(pen, scores, pen.result(1))
        return
    if len(_floats(pen, "base_values", [])) > (ids == {0}):
        raise pen.refusal("weighs one of two classes and has a base value for each", "export it with one base value")
    score = _with_base(pen, pen.reduce("ReduceSum", _leaves(pen, "class", 1), 1))
    probable = bool((_floats(pen, "class_weights", []) >= 0).all())
    above = pen.cast(pen.add("Greater", score, pen.constant(0.5 if probable else 0.0, np.float32)), INT64)
    pen.add("Gather", pen.constant(labels), pen.reduce("ReduceMax", above, -1), out=pen.out)
    if pen.result(1) and ids == {0}:
        _both_classes(pen, score, probable=probable)
    elif pen.result(1):
        nothing = pen.add("Mul", score, zero)
        _post_transformed(pen, pen.add("Concat", nothing, score, axis=-1), pen.result(1))


def _both_classes(pen: Pen, score: str, *, probable: bool) -> None:
    """The second output of one score: that of the second class, and of the first 1 - score, or -score.

    A LOGISTIC transforms -score and score; other transforms leave both as they are.
    """
    logistic = pen.text("post_transform", "NONE") == "LOGISTIC"
    one = pen.constant(1.0, np.float32)
    first = pen.add("Sub", one, score) if probable and not logistic else pen.add("Neg", score)
    both = pen.add("Concat", first, score, axis=-1)
    pen.add("Sigmoid" if logistic else "Identity", both, out=pen.result(1))


def _choose(pen: Pen, scores: str, labels: Array) -> None:
    """The first output: the label of the largest score, the first of equal ones."""
    pen.add("Gather", pen.constant(labels), pen.add("ArgMax", scores, axis=-1, keepdims=0), out=pen.out)


def _post_transformed(pen: Pen, scores: str, out: str) -> None:
    if not out:
        return
    kind = pen.text("post_transform", "NONE")
    operators = {"NONE": "Identity", "SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}
    if kind not in operators:
        raise pen.refusal(f"has the post_transform {kind}", f"use one of {', '.join(operators)}")
    pen.add(operators[kind], scores, out=out, **({"axis": -1} if kind == "SOFTMAX" else {}))


def _linear(pen: Pen, count: int) -> str:
    weights = _floats(pen, "coefficients", []).reshape(count, -1)
    sums = pen.add("MatMul", _real(pen), pen.constant(np.ascontiguousarray(weights.T)))
    intercepts = _floats(pen, "intercepts", [])
    return pen.add("Add", sums, pen.constant(intercepts)) if intercepts.size else sums


def _with_base(pen: Pen, scores: str) -> str:
    base = _floats(pen, "base_values", [])
    return pen.add("Add", scores, pen.constant(base)) if base.size else scores


# --- trees --------------------------------------------------------------------------------------------------------
_COMPARED = {
    "BRANCH_LEQ": "LessOrEqual",
    "BRANCH_LT": "Less",
    "BRANCH_GTE": "GreaterOrEqual",
    "BRANCH_GT": "Greater",
    "BRANCH_EQ": "Equal",
}


def _leaves(pen: Pen, kind: str, count: int) -> str:
    """What each tree says: float32 [N, trees, ``count``].

    All rows go down all trees together, a step for each level: of its node a row reads a feature and a threshold, and
    takes the node of one of two children. Leaves are their own children. ``count`` of 1 takes all weights as one's.
    """
    if pen.known_type(pen.x) == DOUBLE:
        raise pen.refusal("has operands of float64", "export it for float32")
    nodes = list(zip(pen.numbers("nodes_treeids", ()), pen.numbers("nodes_nodeids", ()), strict=True))
    place = {node: index for index, node in enumerate(nodes)}
    modes = [mode.decode() for mode in pen.attribute("nodes_modes", [])]
    leaf = np.asarray([mode == "LEAF" for mode in modes])
    children = [_children(pen, name, nodes, place, leaf) for name in ("nodes_truenodeids", "nodes_falsenodeids")]
    roots = [index for index, node in enumerate(nodes) if index == 0 or nodes[index - 1][0] != node[0]]
    features = np.where(leaf, 0, np.asarray(pen.numbers("nodes_featureids", ()), np.int64))
    kinds = sorted({mode for mode in modes if mode != "LEAF"})
    if len(kinds) > 1 or not set(kinds) <= _COMPARED.keys():
        raise pen.refusal(f"compares by {', '.join(kinds)}", f"use one of {', '.join(_COMPARED)} in all nodes")
    thresholds = pen.constant(np.where(leaf, 0, _floats(pen, "nodes_values", [])).astype(np.float32))
    tracks = np.asarray(pen.numbers("nodes_missing_value_tracks_true", [0] * len(nodes)), bool)
    x = _real(pen)
    at = _roots(pen, x, roots)
    yes, no, feature = pen.constant(children[0]), pen.constant(children[1]), pen.constant(features)
    for _ in range(_depth(pen, roots, children, leaf)):
        value = pen.add("GatherElements", x, pen.add("Gather", feature, at), axis=1)
        goes = pen.add(_COMPARED[kinds[0]], value, pen.add("Gather", thresholds, at))
        if tracks.any():
            strays = pen.add("And", pen.add("IsNaN", value), pen.add("Gather", pen.constant(tracks), at))
            goes = pen.add("Or", goes, strays)
        at = pen.add("Where", goes, pen.add("Gather", yes, at), pen.add("Gather", no, at))
    weights = np.zeros((len(nodes), count), np.float32)
    owners = zip(pen.numbers(f"{kind}_treeids", ()), pen.numbers(f"{kind}_nodeids", ()), strict=True)
    ids = pen.numbers(f"{kind}_ids", ())
    for owner, target, weight in zip(owners, ids, _floats(pen, f"{kind}_weights", []), strict=True):
        weights[place[owner], target if count > 1 else 0] += weight
    return pen.add("Gather", pen.constant(weights), at)


def _roots(pen: Pen, x: str, roots: Sequence[int]) -> str:
    """The node at which each row begins in each tree: int64 [N, trees]."""
    rows = pen.add("Slice", pen.add("Shape", x), pen.integers(0), pen.integers(1))
    shape = pen.add("Concat", rows, pen.integers(len(roots)), axis=0)
    return pen.add("Expand", pen.constant(np.asarray([roots], np.int64)), shape)


def _children(
    pen: Pen, name: str, nodes: Sequence[tuple[int, int]], place: dict[tuple[int, int], int], leaf: Array
) -> Array:
    """The place of the child of each node; of a leaf its own."""
    found = []
    for index, ((tree, _), child) in enumerate(zip(nodes, pen.numbers(name, ()), strict=True)):
        own = index if leaf[index] else place.get((tree, child), -1)
        if own < 0:
            raise pen.refusal(f"names node {child} of tree {tree}, which it has not", "export it again")
        found.append(own)
    return np.asarray(found, np.int64)


def _depth(pen: Pen, roots: Sequence[int], children: Sequence[Array], leaf: Array) -> int:
    """How many steps lead from a root to the last leaf. Raises ModelError where nodes form a circle."""
    level, depth = np.asarray(roots), 0
    while not leaf[level].all():
        level = np.unique(np.concatenate([own[level[~leaf[level]]] for own in children]))
        depth += 1
        if depth > leaf.size:
            raise pen.refusal("has nodes that form a circle", "export it again")
    return depth


# --- operands and attributes --------------------------------------------------------------------------------------
def _real(pen: Pen) -> str:
    """The first operand as float32."""
    return pen.x if pen.element_type(pen.x) == FLOAT else pen.cast(pen.x, FLOAT)


def _floats(pen: Pen, name: str, default: Sequence[float]) -> Array:
    if pen.attribute(f"{name}_as_tensor", None) is not None:
        raise pen.refusal(f"has {name}_as_tensor", "export it for float32")
    return np.asarray(pen.attribute(name, default), np.float32)


def _labels(pen: Pen, name: str) -> Array:
    labels = np.asarray(pen.numbers(name, ()), np.int64)
    if not labels.size:
        raise pen.refusal("has labels that are texts", "export it with labels that are integers")
    return labels


def _numbers(pen: Pen, side: str) -> Array:
    """``keys`` or ``values`` of a LabelEncoder."""
    tensor = pen.attribute(f"{side}_tensor", None)
    if tensor is not None and tensor.data_type != TensorProto.STRING:
        return numpy_helper.to_array(tensor).reshape(-1)
    for suffix, dtype in (("int64s", np.int64), ("floats", np.float32)):
        if (own := pen.attribute(f"{side}_{suffix}", None)) is not None:
            return np.asarray(own, dtype)
    raise pen.refusal(f"has {side} that are texts", "encode texts before the model")
