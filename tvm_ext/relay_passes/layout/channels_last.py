"""Channels-last layouts for half-precision convolutions on GPUs with matrix units.

A matrix instruction takes runs of the reduction axis, a convolution's channels: with NHWC activations and OHWI weights
they are neighbours in memory, and a threadblock copies 16 bytes at a time to shared memory; with NCHW it gathers single
elements. Stock ConvertLayout carries the layout through what lies between the convolutions. What it cannot carry it
transposes, so the conversion is kept only where few transposes of activations remain; those of weights are done here,
once, at compile time.
"""

from __future__ import annotations

from tvm_ext._tvm import Call, IRModule, Node, PassContext, Sequential, copy_module, module_pass, relax
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.layout import CHANNELS_LAST, LAYOUT, LayoutChain, LayoutRecord
from tvm_ext.records.serialise import to_json

from .transposes import (
    CONVOLUTION,
    TRANSPOSE,
    FoldTransposes,
    SinkTransposes,
    SpellForLayouts,
    TurnFilters,
    is_call_of,
)

NHWC = ("NHWC", "OHWI")
TRANSPOSES_PER_CONVOLUTION = 0.5
"""Keep the new layout up to so many transposes of activations per convolution: each costs two passes over memory."""


@module_pass(opt_level=0, name="tvm_ext.ChannelsLast")
class ChannelsLast:
    """Rewrite half-precision convolutions, and what is between them, from NCHW to NHWC where that pays.

    Parameters and results of functions keep their layout. What was decided is left in module attribute
    ``tvm_ext.layout``. Grouped convolutions stay: our kernels for matrix units do not serve them.

    Parameters
    ----------
    device
        The GPU; without matrix units for a convolution's type it stays as it is.
    always
        Convert whatever the number of transposes.
    grouped
        Grouped convolutions too, depthwise ones among them: CUTLASS's templates for them read NHWC alone.
    """

    def __init__(self, device: DeviceSpec, *, always: bool = False, grouped: bool = False) -> None:
        self.device, self.always, self.grouped = device, always, grouped

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        convolutions = [call for call in _calls(mod, CONVOLUTION) if self._is_served(call)]
        if not convolutions:
            return copy_module(mod)
        try:
            converted = FoldTransposes(self._converted(mod)).run()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = f"stock ConvertLayout fails: {str(error).strip().splitlines()[-1]}"
            return self._noted(copy_module(mod), 0, 0, len(convolutions), reason)
        added = len(_calls(converted, TRANSPOSE)) - len(_calls(mod, TRANSPOSE))
        if added > TRANSPOSES_PER_CONVOLUTION * len(convolutions) and not self.always:
            reason = f"{added} transposes of activations would remain for {len(convolutions)} convolutions"
            return self._noted(copy_module(mod), 0, 0, len(convolutions), reason)
        reason = "matrix units read channels that are neighbours in memory"
        return self._noted(converted, len(convolutions), added, len(convolutions), reason)

    def _converted(self, mod: IRModule) -> IRModule:
        if not self.grouped:
            return relax.transform.ConvertLayout({}, self._layouts)(mod)
        converted = relax.transform.ConvertLayout({}, self._layouts)(SpellForLayouts(mod).run())
        # Stock's rule moves the data of grouped convolutions, and leaves their filters as they are.
        moved = SinkTransposes(TurnFilters(converted).run()).run()
        # Transposes that cancelled out are `y = x` bindings, which would end an epilogue.
        return Sequential([relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()])(moved)

    @staticmethod
    def _noted(mod: IRModule, converted: int, transposes: int, candidates: int, reason: str) -> IRModule:
        """``mod`` with what was decided, for the report."""
        chain = LayoutChain(
            operators=(CONVOLUTION,) * candidates,
            blocked_count=converted,
            transform_count=transposes,
            saved_elements=0.0,
            reason=reason,
        )
        return mod.with_attr(LAYOUT, to_json(LayoutRecord(block=CHANNELS_LAST, chains=(chain,))))

    def _layouts(self, call: Call) -> dict[str, list[str]]:
        """What ConvertLayout asks for every call of the module."""
        return {CONVOLUTION: list(NHWC)} if is_call_of(call, CONVOLUTION) and self._is_served(call) else {}

    def _is_served(self, call: Call) -> bool:
        """Whether the matrix units may compute this convolution, given as NCHW."""
        attrs, dtype = call.attrs, str(call.args[0].ty.dtype)
        layouts = (str(attrs.data_layout), str(attrs.kernel_layout))
        has_units = self.device.peak_gflops_of(f"{dtype}_tensor") is not None
        grouped = int(attrs.groups) > 1 and not self.grouped
        return dtype in ("float16", "bfloat16") and has_units and not grouped and layouts == ("NCHW", "OIHW")


def _calls(mod: IRModule, operator: str) -> list[Call]:
    """The calls of ``operator`` in all Relax functions of ``mod``."""
    found: list[Call] = []

    def visit(node: Node) -> None:
        if is_call_of(node, operator):
            found.append(node)

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return found
