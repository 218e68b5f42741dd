"""Products that follow each other, as one GPU kernel (Bolt, §3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..emit.gpu_chains.emit import emit_chain
from ..plan.alternatives import Pick, best_programs
from ..plan.context import KernelContext
from ..plan.form import Form, gpu_form
from ..plan.gpu_chain import ChainGroup, chain_program
from .kernel_kind import Group, KernelKind, KernelPart


class GpuChains(KernelKind):
    name = "a chain"
    on_gpus = True

    def of_group(self, group: Group, context: KernelContext) -> GpuChainPart | None:
        return GpuChainPart(group=group, context=context) if isinstance(group, ChainGroup) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuChainPart(KernelPart[None]):
    """The model ranks the tiles of its products together; the planner has made sure that it can be emitted."""

    group: ChainGroup
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        return next(self.ways())

    def ways(self, pick: Pick = best_programs) -> Iterator[list[Form]]:
        group, device = self.group, self.context.device
        names = " + ".join(link.computation.name for link in group.links)
        for tile, time in group.ranked:
            kernel = emit_chain(group, tile, device, self.context.operator.params)
            notes = [f"{names} in one kernel on {group.units}: {tile}", *kernel.notes]
            yield [gpu_form("rtile", kernel, chain_program(group, tile, time, device), notes)]
