"""A model in, constructed kernels out: `python examples/quickstart.py`."""

from tvm_ext import relay
from tvm_ext.bench import models

model = models.build_model("squeezenet")  # or the path of an .onnx file
mod, params = relay.frontend.from_onnx(model)
lib = relay.build(mod, target="llvm", params=params)
module = relay.GraphModule(lib)
module.run(**models.random_inputs(model))
print(module.get_output(0).numpy().shape, "computed by:")
print(lib.report)
