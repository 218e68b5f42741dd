"""Which templates a region may have: its candidates, best first, each with its source and its launch.

What a configuration is differs from family to family (`family`); what is made of it here does not: a name, a predicted
time, a text, and a `KernelCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, capability_text, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError, TargetError
from tvm_ext.records.partition import CutlassRegion
from tvm_ext.records.serialise import to_json

from .attention import AttentionFamily
from .convolutions import ConvolutionFamily
from .depthwise import DepthwiseFamily
from .family import Config, TemplateFamily, shared_epilogue
from .host import KernelCall
from .pairs import PairFamily
from .products import ProductFamily

RegionKey = TypeVar("RegionKey")

LOOKED_AT = 48
"""Templates of a region among which a shared one is looked for."""

SHARING_TOLERANCE = 1.05
"""So much longer than its fastest template may a region's take, if other regions have it as well: a kernel less to
compile is ten seconds, and no model is right to a twentieth."""

MOST_CANDIDATES = 4
"""Templates of a region that are tried, one after another, where the compiler refuses those before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A template for a region: ``source`` writes the text of its kernel, ``architecture`` is what compiles it."""

    name: str
    time_us: float  # predicted
    architecture: str
    source: Callable[[], str]
    call: KernelCall
    configuration: str = ""  # all of it, what is an argument at run time too, as JSON
    variants: Callable[[], tuple[Candidate, ...]] = tuple  # the same program with other arguments
    measured_us: float | None = None

    @property
    def known_us(self) -> float:
        """Measured, or predicted where it is not."""
        return self.time_us if self.measured_us is None else self.measured_us


def family_of(region: CutlassRegion, device: DeviceSpec) -> TemplateFamily[Any]:
    """The region's family; raises InputError, TargetError, IllegalRewrite for what no template of it reads."""
    problem, (epilogue, *behind) = region.problem, (shared_epilogue(part)[0] for part in region.parts)
    if region.attention is not None:
        return AttentionFamily(problem, device, epilogue, work=region.attention)
    if region.then is not None:
        return PairFamily(problem, device, epilogue, then=region.then.problem, second=behind[0])
    if problem.window is None:
        return ProductFamily(problem, device, epilogue)
    kind = DepthwiseFamily if problem.anchor == "conv2d_depthwise" else ConvolutionFamily
    return kind(problem, device, epilogue)


def candidates_of(region: CutlassRegion, device: DeviceSpec, count: int = LOOKED_AT) -> tuple[Candidate, ...]:
    """The best ``count`` templates for ``region`` on ``device``; raises IllegalRewrite, saying why, where none is."""
    try:
        family = family_of(region, device)
        ranked = family.propose(count)
        if not ranked:
            subject = "" if region.then else f"{region.pattern}: "
            raise IllegalRewrite(f"{subject}{family.why_none()}", "")
    except (InputError, TargetError) as error:
        raise IllegalRewrite(f"{region.pattern}: {error.problem}", error.remedy) from error
    return tuple(_candidate(family, region, each.config, each.time_us) for each in ranked)


def _candidate(family: TemplateFamily[Config], region: CutlassRegion, config: Config, time_us: float) -> Candidate:
    def variants() -> tuple[Candidate, ...]:
        others = family.variants(config)
        return tuple(_candidate(family, region, other, family.predict(other).time_us) for other in others)

    return Candidate(
        name=config.name,
        time_us=time_us,
        architecture=architecture_of(family.device),
        source=lambda: family.source(config),
        call=family.call(config, region),
        configuration=to_json(config),
        variants=variants,
    )


def share_templates(candidates: Mapping[RegionKey, Sequence[Candidate]]) -> dict[RegionKey, tuple[Candidate, ...]]:
    """The candidates of each region to try, first one of few templates that serve all regions nearly as fast.

    Again and again the template that serves most of the regions without one; of equals, the fastest.
    """
    near = {
        region: {one.call.symbol: one for one in templates if one.known_us <= templates[0].known_us * SHARING_TOLERANCE}
        for region, templates in candidates.items()
    }
    first: dict[RegionKey, Candidate] = {}
    while len(first) < len(candidates):
        served: dict[str, list[float]] = {}
        for region in candidates.keys() - first.keys():
            for symbol, template in near[region].items():
                served.setdefault(symbol, []).append(template.known_us / candidates[region][0].known_us)
        best = min(served, key=lambda symbol: (-len(served[symbol]), sum(served[symbol]), symbol))
        first |= {region: known[best] for region, known in near.items() if region not in first and best in known}
    return {region: _behind(first[region], templates) for region, templates in candidates.items()}


def _behind(first: Candidate, templates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    others = [template for template in templates if template.call.symbol != first.call.symbol]
    return (first, *others)[:MOST_CANDIDATES]


def architecture_of(device: DeviceSpec) -> str:
    """What the kernel is compiled for: the device's own machine code, with what only it has."""
    return f"sm_{capability_text(device).replace('.', '')}" + ("a" if has(device, BULK_COPIES_SINCE) else "")
