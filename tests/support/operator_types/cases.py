"""The cases of all recipes, and for each the model of one node and its inputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import ml_dtypes  # noqa: F401 - NumPy learns bfloat16 and its like from it
import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..random_operators.record import Array
from .recipes import NOT_TRIED, RECIPES
from .record import Operand, Recipe, TypeCase

OPSET = 23
"""The operator set of the models; an operator that came later is tried in the one it came with."""

_ONNX_NAMES = {"float": "float32", "double": "float64"}
CODES = {
    _ONNX_NAMES.get(name.lower(), name.lower()): code
    for name, code in onnx.TensorProto.DataType.items()
    if name != "UNDEFINED"
}
"""Type name to ONNX's number of it."""

_PLAIN = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)


NOT_EMPTIED = ("DynamicQuantizeLinear",)
"""By ONNX's definition the scale of nothing is 0, by ONNX Runtime 1."""


def newest_operators() -> dict[str, onnx.defs.OpSchema]:
    """Operator name to schema: of the standard domain, not deprecated, in `OPSET` or the set that it came with."""
    found: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain or schema.deprecated:
            continue
        known = found.get(schema.name)
        if (
            known is None
            or known.since_version < schema.since_version <= OPSET
            or (OPSET < schema.since_version < known.since_version)
        ):
            found[schema.name] = schema
    return found


SCHEMAS = newest_operators()


def _permitted(schema: onnx.defs.OpSchema) -> dict[str, list[str]]:
    """Type parameter to the names of its tensor types."""
    return {
        constraint.type_param_str: [
            _ONNX_NAMES.get(name, name)
            for text in sorted(constraint.allowed_type_strs)
            if text.startswith("tensor(") and (name := text.removeprefix("tensor(").removesuffix(")"))
        ]
        for constraint in schema.type_constraints
    }


def cases_of(operator: str) -> list[TypeCase]:
    """The cases of one operator, in the order of its type parameters."""
    recipe, permitted = RECIPES[operator], _chosen_types(operator)
    usual = dict(_usual_types(operator))
    found = [
        TypeCase(operator=operator, types=tuple((usual | {name: chosen}).items()), tried=(name,))
        for name, types in permitted.items()
        for chosen in types
    ]
    if recipe.is_crossed:
        pairs = [dict(zip(permitted, types, strict=True)) for types in product(_PLAIN, repeat=len(permitted))]
        found += [TypeCase(operator=operator, types=tuple(pair.items()), tried=tuple(permitted)) for pair in pairs]
    return found or [TypeCase(operator=operator, types=(), tried=())]


def _is_chosen(parameter: str, schema: onnx.defs.OpSchema, recipe: Recipe) -> bool:
    operands = recipe.operands
    given = {item.type_str for item, operand in zip(schema.inputs, operands, strict=False) if operand is not None}
    return parameter in given or parameter in recipe.type_attributes


def _usual(types: list[str]) -> str:
    return next((name for name in ("float32", "int64", "bool") if name in types), types[0])


def all_cases() -> Iterator[TypeCase]:
    for operator in sorted(RECIPES):
        yield from cases_of(operator)


def empty_cases() -> Iterator[TypeCase]:
    """Each operator in its usual types, once for each extent of its operands that can be 0."""
    for operator in sorted(set(RECIPES) - set(NOT_EMPTIED)):
        usual = replace(cases_of(operator)[0], types=_usual_types(operator), tried=())
        drawn = [
            operand.shape for operand in RECIPES[operator].operands if operand is not None and not operand.is_known
        ]
        for extent in sorted({extent for shape in drawn for extent in shape}):
            yield replace(usual, empty=extent)


def _usual_types(operator: str) -> tuple[tuple[str, str], ...]:
    fixed = RECIPES[operator].fixed
    return tuple((name, fixed.get(name, _usual(types))) for name, types in _chosen_types(operator).items())


def _chosen_types(operator: str) -> dict[str, list[str]]:
    """Type parameter to what it may be, where an operand or an attribute chooses it."""
    schema, recipe = SCHEMAS[operator], RECIPES[operator]
    return {name: types for name, types in _permitted(schema).items() if _is_chosen(name, schema, recipe)}


def slice_of(part: int, parts: int) -> list[TypeCase]:
    """One case of every `parts`-th operator; another of its types for each operator, by rotation."""
    chosen = sorted(RECIPES)[part::parts]
    return [found[position % len(found)] for position, found in enumerate(map(cases_of, chosen))]


def without_recipe() -> set[str]:
    """Operators of ONNX that are neither tried nor excused."""
    return set(SCHEMAS) - set(RECIPES) - set(NOT_TRIED)


def recipe_of(case: TypeCase) -> Recipe:
    return RECIPES[case.operator] if case.drawn is None else case.drawn[1]


def inputs_of(case: TypeCase) -> dict[str, Array]:
    """The operands by name, constants too, in order; the same in every run."""
    found = {}
    schema, recipe = _schema_of(case), recipe_of(case)
    for position, operand in enumerate(recipe.operands):
        if operand is not None:
            item = schema.inputs[min(position, len(schema.inputs) - 1)]
            generator = np.random.default_rng(zlib.crc32(f"{case.operator} {position}".encode()))
            found[f"x{position}"] = _value(_emptied(operand, case), _type_of(item.type_str, case), generator)
    return found


def _schema_of(case: TypeCase) -> onnx.defs.OpSchema:
    """The operator's schema; the next set's, where an operand came with that: Attention's ``nonpad_kv_seqlen``."""
    schema = SCHEMAS[case.operator]
    if len(recipe_of(case).operands) <= schema.max_input:
        return schema
    return onnx.defs.get_schema(case.operator, OPSET + 1)


def _emptied(operand: Operand, case: TypeCase) -> Operand:
    """The operand with 0 in place of an extent; values that the model knows stay, and most extents of 1."""
    first = recipe_of(case).operands[0]
    if case.empty not in operand.shape or operand.is_known:
        return operand
    if case.empty == 1 and first is not None and operand.shape != first.shape:
        return operand
    shape = tuple(0 if size == case.empty else size for size in operand.shape)
    return replace(operand, shape=shape, values=None if operand.values is None else ())


def _type_of(text: str, case: TypeCase) -> str:
    name = text.removeprefix("tensor(").removesuffix(")")
    return dict(case.types).get(text) or _ONNX_NAMES.get(name, name)


def _value(operand: Operand, dtype: str, generator: np.random.Generator) -> Array:
    if dtype == "string":
        return np.full(operand.shape, "text", object)
    target = np.dtype(helper.tensor_dtype_to_np_dtype(CODES[dtype]))
    if operand.values is not None:
        return np.asarray(operand.values).reshape(operand.shape).astype(target)
    if dtype == "bool":
        return generator.random(operand.shape) < 0.5
    if target.kind in "iu" and operand.whole_range:
        limits = np.iinfo(target)
        return generator.integers(limits.min, limits.max, operand.shape, target, endpoint=True)
    low = max(operand.low, 0.0) if dtype.startswith("uint") else operand.low
    if "int" in dtype:
        drawn = generator.integers(int(np.ceil(low)), int(operand.high) + 1, operand.shape)
        return (drawn if operand.has_zero else np.where(drawn == 0, 1, drawn)).astype(target)
    return generator.uniform(low, operand.high, operand.shape).astype(target)


def known_names(case: TypeCase) -> set[str]:
    """Those of `inputs_of` that are constants of the model."""
    operands = recipe_of(case).operands
    return {f"x{i}" for i, operand in enumerate(operands) if operand is not None and operand.is_known}


def model_of(case: TypeCase, values: Mapping[str, Array], opset: int = OPSET) -> onnx.ModelProto:
    """The model of one node, whose operands have the types of `values`."""
    recipe, schema = recipe_of(case), _schema_of(case)
    types = dict(case.types)
    attributes = dict(recipe.attributes) | {
        attribute: CODES[types[parameter]] for parameter, attribute in recipe.type_attributes.items()
    }
    if case.operator == "Mod" and case.drawn is None and "int" not in types["T"]:
        attributes["fmod"] = 1
    operands = [f"x{i}" if operand is not None else "" for i, operand in enumerate(recipe.operands)]
    outputs = [f"y{i}" for i in range(recipe.outputs)]
    node = helper.make_node(case.operator, operands, outputs, "tried", **attributes)
    followers = [
        helper.make_node(name, outputs[:1], [f"z{i}"], f"follower{i}") for i, name in enumerate(recipe.followers)
    ]
    known = known_names(case)
    codes = {name: _code(value) for name, value in values.items()}
    graph = helper.make_graph(
        [node, *followers],
        "case",
        [helper.make_tensor_value_info(n, codes[n], v.shape) for n, v in values.items() if n not in known],
        [onnx.ValueInfoProto(name=name) for item in (node, *followers) for name in item.output],
        [numpy_helper.from_array(value, name) for name, value in values.items() if name in known],
    )
    if schema.since_version > OPSET:
        opset = schema.since_version
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=12)
    return onnx.shape_inference.infer_shapes(model)


def _code(value: Array) -> int:
    return int(onnx.TensorProto.STRING if value.dtype == object else helper.np_dtype_to_tensor_dtype(value.dtype))
