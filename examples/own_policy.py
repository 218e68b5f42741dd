"""A scheduling policy of your own for Rammer's rTasks: `python examples/own_policy.py`.

Operators in the graph's order, the longest of those that could begin first, each on as few vEUs as end it as early.
"""

from __future__ import annotations

import numpy as np

from tvm_ext import relay
from tvm_ext.bench import models
from tvm_ext.records.rtasks import RTaskGraph, RTaskProgram, need_of
from tvm_ext.relay_passes.wavefronts.earliest_finish import append_earliest
from tvm_ext.relay_passes.wavefronts.kernel_choice import KernelChoices, MakeDevice
from tvm_ext.relay_passes.wavefronts.policies import register_policy
from tvm_ext.relay_passes.wavefronts.program_plan import ProgramPlan


def longest_first(graph: RTaskGraph, make: MakeDevice) -> list[RTaskProgram]:
    """One program; of the operators whose predecessors are all in it, the one with the most work is next."""
    choices = KernelChoices(graph, make)
    chosen = {index: choices.fastest(index) for index in range(len(graph.operators))}
    plan = ProgramPlan(graph, choices.device(need_of(choices.kernel(*pair) for pair in chosen.items())))
    left, done = set(chosen), set[int]()
    while left:
        ready = [index for index in left if done.issuperset(graph.operators[index].predecessors)]
        longest = max(ready, key=lambda index: choices.kernel(index, chosen[index]).work_s)
        append_earliest(plan, longest, chosen[longest])
        left.remove(longest)
        done.add(longest)
    return [plan.program()]


register_policy("longest-first", longest_first)
mod, params = relay.frontend.from_onnx(models.build_model("inception_v1"))
image = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype("float32")
for policy in ("list", "wavefront", "longest-first"):
    lib = relay.build(mod, "llvm", params=params, enable_rammer=True, rammer_policy=policy)
    module = relay.GraphModule(lib)
    module.run(**{lib.inputs[0].name: image})
    assert lib.report.rammer is not None
    predicted_us = sum(region.predicted_us for region in lib.report.rammer.scheduled)
    print(f"{policy}: {predicted_us / 1e3:.2f} ms predicted, class {module.get_output(0).numpy().argmax()}")
