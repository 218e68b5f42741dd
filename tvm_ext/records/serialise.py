"""Records as one line of JSON, and back: strict, so that damage shows."""

from __future__ import annotations

import json
import types
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_REMEMBERED_CHARACTERS = 1 << 16  # a choice: records of kernels, not of models


def to_json(record: object) -> str:
    """The record as one line of JSON; `from_json` with the record's class gives it back."""
    assert is_dataclass(record)
    assert not isinstance(record, type)
    return json.dumps(record, default=_values, separators=(",", ":"))


def _values(record: Any) -> dict[str, Any]:
    """By field; `dataclasses.asdict` copies every leaf as well, which takes three times as long."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def from_json(kind: type[T], text: str) -> T:
    """Rebuild a record of class ``kind`` from `to_json`'s text; raises ValueError where it does not fit."""
    known: Any = kind  # classes are hashable, which mypy does not know of ``type[T]``
    try:
        value = _read_once(known, text) if len(text) <= _REMEMBERED_CHARACTERS else _build(kind, json.loads(text))
    except (AttributeError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
    assert isinstance(value, kind)
    return value


def record_of(node: Any, name: str, kind: type[T]) -> T | None:
    """The record in the attribute ``name`` of a function or module, as `to_json` wrote it; None where it has none."""
    text = node.attrs.get(name) if node.attrs else None
    return None if text is None else from_json(kind, str(text))


@lru_cache(maxsize=256)  # a build asks four times for what was decided about a kernel
def _read_once(kind: type, text: str) -> object:
    return _build(kind, json.loads(text))


def _build(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        unknown = set(value) - {field.name for field in fields(kind)}
        if unknown:
            raise TypeError(f"unknown fields {sorted(unknown)}")
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(_build(kinds[0], item) for item in value)
        return tuple(_build(k, item) for k, item in zip(kinds, value, strict=True))
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _build(_alternative([k for k in get_args(kind) if k is not type(None)], value), value)
    return _leaf(kind, value)


def _alternative(kinds: list[Any], value: Any) -> Any:
    """The kind of a union that ``value`` is: the type that it has (a list: a tuple), else the first."""
    wanted = tuple if isinstance(value, list) else type(value)
    return next((kind for kind in kinds if wanted in (kind, get_origin(kind))), kinds[0])


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Of a record's fields; reading their annotations anew takes longer than the rest of `from_json`."""
    return get_type_hints(kind)


def _leaf(kind: Any, value: Any) -> Any:
    """``value`` itself; raises TypeError where JSON held something else than a field of ``kind`` takes."""
    if get_origin(kind) is Literal:
        fits = value in get_args(kind)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is kind if kind in (str, int, bool) else True
    if not fits:
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value
