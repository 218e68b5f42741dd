"""Draws legal configurations of every kind of template, each with an epilogue; the same for a seed on every machine.

Cases take turns over compute capabilities and kinds. Among what is legal, first the family (iterator, schedule,
residence, splits) is drawn and then a member, so that the few templates of a small family are seen too. Draws go by
digests: a rule of legality that is added changes the cases that it refuses, and no others.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tvm_ext.byoc_cutlass.back_to_back import PairConfig
from tvm_ext.byoc_cutlass.convolution import ConvolutionConfig, DepthwiseConfig
from tvm_ext.byoc_cutlass.elements import MULTIPLIERS
from tvm_ext.byoc_cutlass.emit import emit_gemm
from tvm_ext.byoc_cutlass.family import TemplateFamily
from tvm_ext.byoc_cutlass.gemm import GemmConfig, packed_problem
from tvm_ext.byoc_cutlass.pairs import ARITHMETICS, AnyPair, PairFamily
from tvm_ext.devices.capabilities import BULK_COPIES_SINCE
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.partition import CutlassProblem, Order

from .convolutions import AnyConfig, convolution_family, convolution_of, random_problem
from .epilogues import random_epilogue
from .products import CAPABILITIES, architecture_of, arithmetics_of, device_of, legal_configs

Item = TypeVar("Item")

_EXTENTS = (64, 128, 200, 768, 1000, 1024, 4096)
_LAYOUTS: tuple[Order, ...] = ("row", "column")
_RESULTS = {"float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32"), "int8": ("int8", "int32")}
_PAIR_COLUMNS = (16, 32, 64, 96, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateCase:
    """A template, the text of its kernel, and what it is compiled for."""

    index: int
    kind: str
    architecture: str
    template: str
    epilogue: str
    source: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the namespaces in the text, one of which is in the names of most kernels."""
        return tuple(dict.fromkeys(re.findall(r"^namespace (\w+_template) {", self.source, re.MULTILINE)))

    @property
    def key(self) -> str:
        """A digest of what is compiled, but for the digests in names."""
        text = re.sub(r"_[0-9a-f]{12}(?![0-9a-f])", "", self.source)
        return hashlib.sha256(f"{self.architecture}\n{text}".encode()).hexdigest()[:16]


def draw_case(seed: int, index: int) -> TemplateCase:
    """Case ``index`` of ``seed``."""
    turn, place = divmod(index, len(CAPABILITIES))
    capability = CAPABILITIES[place]
    kind = TURNS[turn % len(TURNS)]
    kind = kind if capability >= BULK_COPIES_SINCE else _OLDER.get(kind, kind)
    device, attempt = device_of(capability), 0
    while True:
        rng = random.Random(f"{seed} {index} {attempt}")
        attempt += 1
        drawn = DRAWS[kind](rng, device, turn)
        if drawn is not None:
            template, epilogue, source = drawn
            return TemplateCase(
                index=index, kind=kind, architecture=architecture_of(capability), template=template, epilogue=epilogue,
                source=source,
            )  # fmt: skip


Drawn = tuple[str, str, str] | None
"""Names of a template and its epilogue, the kernel's text; None where nothing is legal for what was drawn."""
Draw = Callable[[random.Random, DeviceSpec, int], Drawn]


def _member(
    rng: random.Random, items: Sequence[Item], family: Callable[[Item], str], name: Callable[[Item], str]
) -> Item | None:
    """One of ``items``: of a family that is drawn first."""
    salt = rng.random()

    def drawn(text: str) -> str:
        return hashlib.sha256(f"{salt} {text}".encode()).hexdigest()

    families = sorted({family(item) for item in items}, key=drawn)
    members = [item for item in items if family(item) == families[0]]
    return min(members, key=lambda item: drawn(name(item))) if members else None


# --- matrix products -------------------------------------------------------------------------------------------------
def _product(rng: random.Random, device: DeviceSpec, turn: int, *, collective: bool = False) -> Drawn:
    """Arithmetics take turns; of a ``collective``, those that it has."""
    known = [name for name in arithmetics_of(device) if not (collective and name == "float32")]
    arithmetic = known[turn % len(known)]
    out = rng.choice(_results(arithmetic))
    m, n, k = (rng.choice(_EXTENTS) for _ in range(3))
    along_k = MULTIPLIERS[arithmetic].k_contiguous or (collective and MULTIPLIERS[arithmetic].bits != 16)
    layout_a: Order = "row"
    layout_b: Order = "column"
    if not along_k:
        layout_a, layout_b = rng.choice(_LAYOUTS), rng.choice(_LAYOUTS)
    batch = rng.choice((1, 1, 4))
    problem = packed_problem(
        m=m, n=n, k=k, arithmetic=arithmetic, layout_a=layout_a, layout_b=layout_b, out_dtype=out, batch=batch
    )
    epilogue = random_epilogue(rng, out, batched=batch > 1)
    legal = [form for item in legal_configs(problem, device, epilogue) for form in _forms(item, batch)]
    legal = [item for item in legal if item.generation == "3.x" or not collective]
    config = _member(rng, legal, _family, lambda item: item.name)
    if config is None:
        return None
    return config.name, epilogue.expression, emit_gemm(config, epilogue, problem)


def _results(arithmetic: str) -> Sequence[str]:
    return _RESULTS.get(arithmetic, ("float16", "bfloat16") if arithmetic.startswith("float8") else ("float32",))


def _forms(config: GemmConfig, batch: int) -> list[GemmConfig]:
    """As it is, and in its stream-K form where it has one."""
    whole = config.is_simt or config.schedule in ("pingpong", "single") or batch > 1
    return [config] if whole else [config, config.with_split(2)]


def _family(config: GemmConfig) -> str:
    return f"{config.generation} {config.schedule} {config.split_k}"


# --- convolutions ----------------------------------------------------------------------------------------------------
def _convolution(kind: str, *, bulk: bool = False) -> Draw:
    def draw(rng: random.Random, device: DeviceSpec, _turn: int) -> Drawn:
        assert device.compute_capability is not None
        problem = random_problem(rng, kind, device.compute_capability)
        epilogue = random_epilogue(rng, problem.dtypes[2])
        family: TemplateFamily[Any] = convolution_family(problem, device, epilogue)
        legal = [item for item in family.legal() if not bulk or _is_bulk(item)]
        config = _member(rng, legal, _reader, lambda item: item.name)
        return None if config is None else (config.name, epilogue.expression, family.source(config))

    return draw


def _is_bulk(config: AnyConfig) -> bool:
    return isinstance(config, ConvolutionConfig) and config.iterator == "bulk"


def _reader(config: AnyConfig) -> str:
    if isinstance(config, DepthwiseConfig):
        return f"direct {config.strides is None}"
    assert isinstance(config, ConvolutionConfig)
    return f"{config.iterator} {config.grouping} {config.tile.architecture}"


# --- pairs -----------------------------------------------------------------------------------------------------------
def _pair(rng: random.Random, device: DeviceSpec, _turn: int, *, convolution: bool) -> Drawn:
    capability = device.compute_capability
    assert capability is not None
    dtype = rng.choice([name for name, since in ARITHMETICS.items() if capability[0] * 10 + capability[1] >= since])
    out, layout = rng.choice((dtype, "float32")), rng.choice(_LAYOUTS)
    first = random_epilogue(rng, dtype, roles=("row",), dtypes=(rng.choice((dtype, "float32")),), most=2)
    second = random_epilogue(rng, out, roles=("row", "matrix"), dtypes=(out,), most=1)
    head, tail = _pair_of(rng, dtype, out, layout, convolution)
    family = PairFamily(head, device, first, then=tail, second=second)
    config = _member(rng, list(family.legal()), _place, lambda item: item.name)
    return None if config is None else (config.name, f"{first.expression}; {second.expression}", family.source(config))


def _pair_of(
    rng: random.Random, dtype: str, out: str, layout: Order, convolution: bool
) -> tuple[CutlassProblem, CutlassProblem]:
    between, last = rng.choice(_PAIR_COLUMNS), rng.choice((*_PAIR_COLUMNS, 24, 40))
    if convolution:
        window = rng.choice(((3, 3), (1, 1), (5, 3)))
        head = convolution_of(
            channels=rng.choice((8, 48, 64)), filters=between, window=window, stride=rng.choice((1, 2)), dtype=dtype
        )
        assert head.window is not None
        p, q = head.window.output_extents
        tail = convolution_of(extents=(p, q), channels=between, filters=last, window=(1, 1), dtype=dtype, out_dtype=out)
        return head, tail
    rows, depth = rng.choice((2464, 16384)), rng.choice((32, 100, 256))
    head = packed_problem(m=rows, n=between, k=depth, arithmetic=dtype, layout_b=layout, out_dtype=dtype)
    return head, packed_problem(m=rows, n=last, k=between, arithmetic=dtype, layout_b=layout, out_dtype=out)


def _place(config: AnyPair) -> str:
    return config.residence if isinstance(config, PairConfig) else "streamed"


DRAWS: dict[str, Draw] = {
    "product": _product,
    "collective product": partial(_product, collective=True),
    "windows": _convolution("windows"),
    "collective windows": _convolution("windows", bulk=True),
    "first layer": _convolution("first layer"),
    "groups": _convolution("groups"),
    "depthwise": _convolution("depthwise"),
    "one position": _convolution("plain"),
    "pair of products": partial(_pair, convolution=False),
    "pair with a convolution": partial(_pair, convolution=True),
}
TURNS = (
    "product", "collective windows", "pair of products", "collective product", "groups", "collective product",
    "pair with a convolution", "first layer", "collective product", "windows", "product", "depthwise", "one position",
)  # fmt: skip
"""Kinds in their turn, for every capability."""
_OLDER = {"collective product": "product", "collective windows": "windows"}
"""What has its turn on devices without collectives."""
