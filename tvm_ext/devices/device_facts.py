"""Builds a `DeviceSpec` from its `Fact`s, so that each number is written once and never without its source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .hal import DeviceKind, DeviceSpec, Fact, MemoryLayer, MemoryScope


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerText:
    """The part of a `MemoryLayer` that is not a number."""

    description: str
    scope: MemoryScope


def fact(field: str, value: float | int | str, unit: str, source: str, *, used: bool = True) -> Fact:
    """A `Fact` written on one line."""
    return Fact(field=field, value=value, unit=unit, source=source, used=used)


def spec_from_facts(
    *,
    name: str,
    kind: DeviceKind,
    description: str,
    layers: tuple[LayerText, ...],
    facts: Iterable[Fact],
    aliases: tuple[str, ...] = (),
    target: tuple[tuple[str, str | int | tuple[str, ...]], ...] = (),
) -> DeviceSpec:
    """The device whose fields are the values of the used ``facts``; a field without a used fact stays None.

    Paths: ``unit_count``, ``layers.L1.capacity_bytes``, ``peak_gflops.float32``; ``compute_capability`` is written
    "7.0" and ``tensor_core_shape`` "16x16x16". The capacity of L0 is not a fact of its own but
    ``register_limit`` x ``register_bytes`` (V100: 96 registers x 4 bytes = 384 bytes a thread), and is added as one.
    """
    facts = tuple(facts)
    values = _used_values(facts)
    if "layers.L0.capacity_bytes" not in values:
        derived = fact(
            "layers.L0.capacity_bytes",
            int(values["register_limit"]) * int(values["register_bytes"]),
            "bytes",
            "register_limit x register_bytes",
        )
        facts += (derived,)
        values[derived.field] = derived.value
    built = tuple(_layer(f"L{index}", text, values) for index, text in enumerate(layers))
    scalars: dict[str, Any] = {path: value for path, value in values.items() if "." not in path}
    if "compute_capability" in scalars:
        scalars["compute_capability"] = _int_tuple(scalars["compute_capability"], ".")
    if "tensor_core_shape" in scalars:
        scalars["tensor_core_shape"] = _int_tuple(scalars["tensor_core_shape"], "x")
    scalars.setdefault("clock_ghz", None)
    for rates in ("peak_gflops", "instruction_gops", "function_cycles", "row_shares"):
        scalars[rates] = _pairs(values, f"{rates}.")
    return DeviceSpec(
        name=name,
        kind=kind,
        description=description,
        aliases=aliases,
        target=target,
        layers=built,
        facts=facts,
        **scalars,
    )


def with_facts(spec: DeviceSpec, facts: Iterable[Fact]) -> DeviceSpec:
    """``spec`` with each field named by a used fact of ``facts`` replaced; the former facts stay, unused, behind it."""
    fresh = {fact.field: fact for fact in facts}
    if fresh.keys() & {"register_limit", "register_bytes"}:
        former = tuple(fact for fact in spec.facts if fact.field != "layers.L0.capacity_bytes")
    else:
        former = spec.facts
    merged = []
    for item in former:
        if item.field in fresh and item.used:
            merged += [fresh[item.field], replace(item, used=False)]
        else:
            merged.append(item)
    known = {item.field for item in former if item.used}
    return spec_from_facts(
        name=spec.name,
        kind=spec.kind,
        description=spec.description,
        aliases=spec.aliases,
        target=spec.target,
        layers=tuple(LayerText(description=layer.description, scope=layer.scope) for layer in spec.layers),
        facts=(*merged, *(item for path, item in fresh.items() if path not in known)),
    )


def with_unit_count(spec: DeviceSpec, unit_count: int) -> DeviceSpec:
    """``spec`` with another number of execution units.

    Peaks and the bandwidths of all layers but the lowest grow in proportion (14 -> 2 cores: a seventh), for each unit
    brings its own pipes and its own share of the caches; the lowest layer, DRAM, is one for all and stays.
    """
    if unit_count == spec.unit_count:
        return spec
    ratio = unit_count / spec.unit_count
    source = f"{spec.name} scaled from {spec.unit_count} to {unit_count} units"
    scaled = [fact("unit_count", unit_count, "count", "asked for by the target (num-cores) or usable here")]
    scaled += [
        fact(item.field, float(item.value) * ratio, item.unit, f"{source}; {item.source}")
        for item in spec.facts
        if item.used and _grows_with_units(item.field, spec)
    ]
    return with_facts(spec, scaled)


def _grows_with_units(path: str, spec: DeviceSpec) -> bool:
    is_bandwidth = path.endswith(".bandwidth_gb_per_s") and not path.startswith(f"layers.{spec.lowest_layer.name}.")
    return is_bandwidth or path.startswith(("peak_gflops.", "instruction_gops."))


def _pairs(values: dict[str, float | int | str], prefix: str) -> tuple[tuple[str, float], ...]:
    return tuple((path.removeprefix(prefix), float(v)) for path, v in values.items() if path.startswith(prefix))


def _used_values(facts: tuple[Fact, ...]) -> dict[str, float | int | str]:
    values: dict[str, float | int | str] = {}
    for item in facts:
        if item.used:
            assert item.field not in values, f"two used facts for {item.field}"
            values[item.field] = item.value
    return values


def _layer(name: str, text: LayerText, values: dict[str, Any]) -> MemoryLayer:
    prefix = f"layers.{name}."
    numbers = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
    numbers.setdefault("capacity_bytes", None)
    numbers.setdefault("bandwidth_gb_per_s", None)
    return MemoryLayer(name=name, description=text.description, scope=text.scope, **numbers)


def _int_tuple(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator))
