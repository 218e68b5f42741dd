"""The bundle's table of contents, and the checks of a bundle before anything in it runs. Standard library alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cases import Case, Tensor

SCHEMA = 2
NAME = "manifest.json"
STEPS = "steps"
"""`Program.kind` of several functions."""
SIZE_LIMIT_BYTES = 40_000_000


class BundleError(Exception):
    """The bundle cannot be used: damaged, of another version, or not for this device. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """Another form of an input: ``axes`` of it in this order, then zeros behind each up to ``shape``."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call of ``function`` with tensors by name, the one that it writes last; ``y`` is the case's output."""

    function: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One contender's code for a case: ``function`` of library ``file``, which takes inputs and output in this order.

    Of ``kind`` "model" it is a function of the Relax VM, which takes the inputs and answers the outputs. Of ``kind``
    "steps" it is several functions, called one after the other: with the case's inputs, of which ``arranged`` are
    brought into another form once, before anything is timed, and with tensors ``between`` them. ``plan`` is what was
    planned (rProgram, launches, templates) and what the compiler said of it, as JSON.
    """

    contender: str
    file: str
    function: str
    kind: str = "kernel"
    plan: Mapping[str, Any] = field(default_factory=dict)
    arranged: Mapping[str, Arranged] = field(default_factory=dict)
    between: tuple[Tensor, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A case and the code for it. ``refusals`` say, by contender, why one has none."""

    case: Case
    programs: tuple[Program, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``toolkit`` (13, 0) is the CUDA version of the machine code; ``digests`` are SHA-256 of all files by name."""

    created: str
    commit: str
    device: str
    architectures: tuple[str, ...]
    toolkit: tuple[int, int]
    versions: Mapping[str, str]
    entries: tuple[Entry, ...]
    digests: Mapping[str, str]

    @property
    def identity(self) -> str:
        """Two results with the same identity were measured with the same code."""
        return hashlib.sha256("".join(sorted(self.digests.values())).encode()).hexdigest()[:16]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def to_json(manifest: Manifest) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=1) + "\n"


def from_json(text: str) -> Manifest:
    """Raises BundleError for what `to_json` did not write."""
    try:
        record = json.loads(text)
        if record.pop("schema") != SCHEMA:
            raise BundleError(f"the bundle has not the schema {SCHEMA}: make it again with this version")
        entries = tuple(_entry(item) for item in record.pop("entries"))
        record["architectures"] = tuple(record["architectures"])
        record["toolkit"] = (int(record["toolkit"][0]), int(record["toolkit"][1]))
        return Manifest(**record, entries=entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BundleError(f"{NAME} cannot be read ({type(error).__name__}: {error}): copy the bundle again") from error


def _entry(record: Mapping[str, Any]) -> Entry:
    programs = tuple(_program(item) for item in record["programs"])
    return Entry(case=Case.from_record(record["case"]), programs=programs, refusals=record["refusals"])


def _program(record: Mapping[str, Any]) -> Program:
    forms = record["arranged"].items()
    arranged = {name: Arranged(axes=tuple(form["axes"]), shape=tuple(form["shape"])) for name, form in forms}
    between = tuple(Tensor(**{**item, "shape": tuple(item["shape"])}) for item in record["between"])
    steps = tuple(Step(function=item["function"], arguments=tuple(item["arguments"])) for item in record["steps"])
    return Program(**{**record, "arranged": arranged, "between": between, "steps": steps})


def read_bundle(folder: Path) -> Manifest:
    """The manifest of the bundle in ``folder``; raises BundleError unless all its files are there and whole."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{folder} is no bundle: {NAME} cannot be read ({error})") from error
    manifest = from_json(text)
    for name, expected in manifest.digests.items():
        path = folder / name
        if not path.is_file():
            raise BundleError(f"{name} is missing from {folder}: copy the bundle again")
        if digest(path) != expected:
            raise BundleError(f"{name} is damaged (its checksum differs): copy the bundle again")
    listed = {program.file for entry in manifest.entries for program in entry.programs}
    if not listed <= set(manifest.digests):
        raise BundleError(f"{NAME} names files that it has no checksum of: make the bundle again")
    return manifest


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """sm_80 runs on 8.0, 8.6, 8.9; sm_90a, which uses what later devices may lack, on 9.0 alone."""
    digits = architecture.removeprefix("sm_").rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    same = (major, minor) == capability
    return same if architecture.endswith("a") else major == capability[0] and minor <= capability[1]


def check_device(manifest: Manifest, capability: tuple[int, int], driver: int) -> None:
    """Raise BundleError unless a device of ``capability`` (9, 0) under ``driver`` (13000: CUDA 13.0) can run the code.

    Machine code runs on devices of its own major architecture and the same or a later minor one, under drivers of its
    toolkit's major version or later.
    """
    if not any(_runs_on(item, capability) for item in manifest.architectures):
        have = ", ".join(manifest.architectures)
        raise BundleError(
            f"this device is of compute capability {capability[0]}.{capability[1]}, the bundle has code for {have}: "
            f"make it with --architecture sm_{capability[0]}{capability[1]}"
        )
    if driver // 1000 < manifest.toolkit[0]:
        raise BundleError(
            f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, the bundle was compiled by CUDA "
            f"{manifest.toolkit[0]}.{manifest.toolkit[1]}: install a newer driver, or bundle with an older nvcc"
        )
