"""Our passes between stock TVM's and your own, in a `tvm.transform.Sequential`: `python examples/own_passes.py`.

`relay.build` runs a ready-made sequence (tvm_ext/pass_pipeline.py, to be read from top to bottom). Here the same ground
is covered by hand, with a pass of our own making that looks at the kernels on their way.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_ext import relay
from tvm_ext.bench import models
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import lowering_pipeline
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.relay_passes.pack_constants import PackConstants
from tvm_ext.tir_passes.construct_kernels import ConstructKernels


@tvm.transform.module_pass(opt_level=0, name="example.CountPaths")
class CountPaths:
    """A user's pass: counts which way each kernel was made; every kernel says so in an attribute."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()

    def transform_module(self, mod: Any, _context: Any) -> Any:
        for function in mod.functions.values():
            if function.attrs and CHOICE in function.attrs:
                self.paths[from_json(KernelChoice, str(function.attrs[CHOICE])).path] += 1
        return mod


def main() -> None:
    device, target = device_for_target("llvm")
    model = models.build_model("squeezenet")
    mod, params = relay.frontend.from_onnx(model)
    parameters = {var: params[var.name] for var in mod["main"].params if var.name in params}

    kernels = tvm.transform.Sequential(
        [
            relax.transform.BindParams("main", parameters),
            # Stock TVM: from operators to one TensorIR function per group of fused operators.
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            # Ours: one constructed kernel for each.
            AnnotateConstants(),
            ConstructKernels(device, BuildOptions(candidates=5)),
            counter := CountPaths(),
            PackConstants(),
        ],
        name="example.kernels",
    )
    with target:
        scheduled = kernels(mod)
        executable = relax.build(scheduled, target, relax_pipeline=lowering_pipeline(target))

    ((name, data),) = models.random_inputs(model).items()
    output = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()

    library = relay.build(mod, "llvm", params=params)
    module = relay.GraphModule(library)
    module.run(**{name: data})
    difference = np.abs(output - module.get_output(0).numpy()).max()
    print("kernels by path:", dict(counter.paths))
    print(f"largest difference from relay.build: {difference:.2g}")


if __name__ == "__main__":
    main()
