"""Many requests from several clients to a running server: every answer is compared, memory is watched.

cp some.onnx examples/serve/model.onnx
mlserver start examples/serve &
python examples/serve/soak.py --requests 10000 --clients 8
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Send the requests and print what came of them; ends with 1 where an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--port", type=int, default=8080)
    asked = parser.parse_args()
    peer = onnxruntime.InferenceSession(HERE / "model.onnx", providers=["CPUExecutionProvider"])
    (item,) = peer.get_inputs()
    rng = np.random.default_rng(0)
    shape = [extent if isinstance(extent, int) else 1 for extent in item.shape]
    questions = [rng.standard_normal(shape).astype("float32") for _ in range(32)]
    bodies = [_body(item.name, value) for value in questions]
    answers = [peer.run(None, {item.name: value})[0].ravel() for value in questions]
    before, start = _memory(), time.perf_counter()
    with ThreadPoolExecutor(asked.clients) as pool:
        share = [range(first, asked.requests, asked.clients) for first in range(asked.clients)]
        results = list(pool.map(lambda own: _client(asked.port, own, bodies, answers), share))
    wrong = sum(count for count, _ in results)
    times = sorted(took for _, own in results for took in own)
    rate = asked.requests / (time.perf_counter() - start)
    p50, p99 = statistics.median(times), times[len(times) * 99 // 100]
    print(f"{asked.requests} requests, {asked.clients} clients: {wrong} wrong, {rate:.0f} a second")
    print(f"p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms; the server's memory {before} -> {_memory()} MiB")
    raise SystemExit(wrong > 0)


def _body(name: str, value: Any) -> str:
    data = {"name": name, "shape": value.shape, "datatype": "FP32", "data": value.ravel().tolist()}
    return json.dumps({"inputs": [data]})


def _client(port: int, numbers: range, bodies: list[str], answers: list[Any]) -> tuple[int, list[float]]:
    connection, wrong, times = http.client.HTTPConnection("127.0.0.1", port), 0, []
    for number in numbers:
        start = time.perf_counter()
        connection.request(
            "POST", "/v2/models/model/infer", bodies[number % len(bodies)], {"Content-Type": "application/json"}
        )
        reply = json.loads(connection.getresponse().read())
        times.append(time.perf_counter() - start)
        wanted = answers[number % len(answers)]
        own = np.array(reply["outputs"][0]["data"]) if "outputs" in reply else np.full(1, np.nan)
        wrong += own.shape != wanted.shape or not np.allclose(own, wanted, rtol=1e-4, atol=1e-5)
    return wrong, times


def _memory() -> int:
    """MiB that the server has resident."""
    found = subprocess.run(
        ["pgrep", "-f", "mlserver start"], capture_output=True, text=True, check=False
    ).stdout.split()
    status = [Path(f"/proc/{pid}/status").read_text() for pid in found]
    sizes = [int(line.split()[1]) for text in status for line in text.splitlines() if line.startswith("VmRSS")]
    return max(sizes, default=0) >> 10


if __name__ == "__main__":
    main()
