"""What is documented to run with the package alone, and with each extra of pyproject.toml.

`python3 dev.py wheel` tries the package alone and `QUICK`, with ``--extras`` each in a clean environment of its own,
from the wheel, in a folder without sources of the package. Imports the standard library alone.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples", "tests")
"""What documented commands run of a clone beside the package."""

QUICK = ("rpc",)
PORT = 9417

MODEL = """
import numpy as np, onnx
from onnx import TensorProto, helper, numpy_helper
random = np.random.default_rng(0)
weights = {"w": (8, 3, 3, 3), "v": (8, 16)}
kinds = [("Conv", "input w", "c"), ("Relu", "c", "r"), ("GlobalAveragePool", "r", "g"), ("Flatten", "g", "f")]
nodes = [helper.make_node(kind, read.split(), [made]) for kind, read, made in [*kinds, ("MatMul", "f v", "y")]]
graph = helper.make_graph(
    nodes,
    "small",
    [helper.make_tensor_value_info("input", TensorProto.FLOAT, (1, 3, 224, 224))],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 16))],
    [numpy_helper.from_array(random.standard_normal(shape).astype("float32"), name) for name, shape in weights.items()],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "model.onnx")
np.save("data.npy", random.standard_normal((1, 3, 224, 224)).astype("float32"))
"""

README = """
import onnx
from tvm import relay
mod, params = relay.frontend.from_onnx(onnx.load("model.onnx"))
lib = relay.build(mod, "llvm", params=params, enable_roller=True)
print(lib.report)
"""

DASK = """
from dask.distributed import Client
from tests.unit.autotune import jobs
from tvm_ext.autotune.builders import ExecutorBuilder
from tvm_ext.autotune.measure import Measurer
if __name__ == "__main__":
    with Client(n_workers=1, threads_per_worker=1) as dask_client:
        builder = ExecutorBuilder(dask_client.get_executor(), workers=64)
        with Measurer(builder) as measurer:
            assert [trial.outcome for _, trial in measurer.measure([jobs.job("a")])] == ["ok"]
"""

RPC = f"""
import time
from tests.unit.autotune import jobs
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import TrackerFleet
from tvm_ext.autotune.tracker import Tracker
if __name__ == "__main__":
    time.sleep(8)  # both are starting
    with Measurer(runners=TrackerFleet(Tracker("127.0.0.1", {PORT}), "cpu")) as measurer:
        assert [trial.outcome for _, trial in measurer.measure([jobs.job("a")])] == ["ok"]
"""

SERVE = """
import http.client, subprocess, sys, time
import onnx
model = onnx.load("model.onnx")
for value in (*model.graph.input, *model.graph.output):
    value.type.tensor_type.shape.dim[0].dim_param = "batch"  # requests that come together are one batch
onnx.save(model, "examples/serve/model.onnx")
with subprocess.Popen(["mlserver", "start", "examples/serve"]) as server:
    try:
        for _ in range(120):
            time.sleep(1)
            try:
                connection = http.client.HTTPConnection("127.0.0.1", 8080)
                connection.request("GET", "/v2/models/model/ready")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                continue
        subprocess.run([sys.executable, "examples/serve/soak.py", "--requests", "80"], check=True)
    finally:
        server.terminate()
"""


@dataclass(frozen=True)
class Documented:
    """A command of a page under docs/, or of the README, with what makes it short here; or ``script``, which has it."""

    page: str
    text: str
    more: str = ""
    script: str = ""

    @property
    def shell(self) -> str:
        script = f"cat > documented.py <<'END'\n{self.script}\nEND\npython documented.py"
        return script if self.script else f"{self.text} {self.more}".strip()


GUIDE, TESTING, TUNING = "docs/guide.md", "docs/testing.md", "docs/tuning.md"
OPERATORS = "python benchmarks/operators.py C0 D4 --batch 8 --peer onnxruntime --peer stock_tvm"
SERVER = "python -m tvm_ext.autotune.rpc_servers server --tracker 127.0.0.1:9190 --key cpu"
GPU = "tvm-ext compile model.onnx --target nvidia-h200 -o gpu.so"

EXTRAS: dict[str, tuple[Documented, ...]] = {
    "": (
        Documented("README.md", 'lib = relay.build(mod, "llvm", params=params, enable_roller=True)', script=README),
        Documented(GUIDE, "tvm-ext compile model.onnx --shape input=1,3,224,224 -o model.so --report report.html"),
        Documented(GUIDE, "tvm-ext run model.so --input input=data.npy --output result.npz"),
        Documented(GUIDE, "tvm-ext explain resnet50"),
        Documented(GUIDE, "tvm-ext advise resnet50"),
        Documented(GUIDE, "tvm-ext devices nvidia-v100"),
        Documented(GUIDE, "tvm-ext tune model.onnx --trials 200", "--trials 4"),
        Documented(GUIDE, "tvm-ext database show"),
        Documented(GUIDE, "tvm-ext cache --clear"),
        Documented(GUIDE, "tvm-ext doctor"),
        Documented(GUIDE, "tvm-ext doctor model.so"),
    ),
    "bench": (
        Documented(GUIDE, "tvm-ext bench model.onnx"),
        Documented(GUIDE, "tvm-ext bench resnet50 --batch 8", "--rounds 1 --peer onnxruntime"),
        Documented(TESTING, OPERATORS, "--output a.json"),
        Documented(TESTING, "python benchmarks/matmul.py", "M3 --scale 16 --output b.json"),
        Documented(TESTING, "python benchmarks/persistent.py", "T1.2 --rounds 2 --scale 4 --output c.json"),
        Documented("docs/results.md", "python benchmarks/rammer.py", "lstm_tc --rounds 2 --output d.json"),
        Documented(TESTING, "python -m tests.support.random_chains", "--count 2"),
    ),
    "cuda": (Documented(GUIDE, GPU), Documented(GUIDE, GPU, "--cutlass")),
    "cuda12": (Documented(GUIDE, GPU, "--target nvidia-v100"),),
    "cutlass": (Documented(GUIDE, "tvm-ext profile model.onnx --plan", "--device nvidia-a100"),),
    "dask": (Documented(TUNING, "builder = ExecutorBuilder(dask_client.get_executor(), workers=64)", script=DASK),),
    "dev": (
        Documented("docs/add-a-kernel.md", "python -m pytest tests/unit/tir_passes tests/golden", "-k golden"),
        Documented(TESTING, "python -m tests.support.operator_types", "--match '^Relu '"),
    ),
    "heuristics": (Documented("docs/results.md", "python benchmarks/gpu/heuristics.py", "--output ."),),
    "models": (Documented(TESTING, "python -m tests.support.exported_models swin gpt2 --exporter torchscript"),),
    "notebooks": (Documented(GUIDE, "jupyter execute examples/resnet.ipynb"),),
    "opencl": (Documented(TESTING, "python -m tests.support.random_operators", "--device nvidia-a100 --count 4"),),
    "serve": (Documented(GUIDE, "mlserver start examples/serve", script=SERVE),),
    "rocm": (Documented(GUIDE, GPU, "--target amd-mi50"),),
    "rpc": (
        Documented(TUNING, "python -m tvm_ext.autotune.rpc_servers tracker", f"--port {PORT} &"),
        Documented(TUNING, SERVER, f"--tracker 127.0.0.1:{PORT} &"),
        Documented(TUNING, 'Measurer(runners=TrackerFleet(Tracker("127.0.0.1", 9190), "cpu"))', script=RPC),
    ),
}


def make_workplace(folder: Path) -> None:
    """Put the files into ``folder`` that documented commands name, and what they run of a clone."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", folder)
    (folder / "make_model.py").write_text(MODEL)


def shell_script(commands: tuple[Documented, ...]) -> str:
    """``commands`` one after another, the first failure being the end; what goes on in the background ends with it."""
    lines = ["set -eu", "started=", "trap 'kill $started 2>/dev/null || true' EXIT", "python make_model.py"]
    for item in commands:
        lines += [f"echo {shlex.quote(f'+ {item.text} {item.more}')}", item.shell]
        lines += ['started="$started $!"'] * item.shell.endswith("&")
    return "\n".join(lines)
