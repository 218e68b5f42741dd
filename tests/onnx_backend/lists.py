"""The two committed lists: what stock TVM passes, and which cases we are expected to refuse.

    python -m tests.onnx_backend.lists stock       # after a change of TVM or onnx: writes stock_passes.json
    python -m tests.onnx_backend.lists failures    # after an improvement: drops from expected_failures.txt what passes

The second list holds refusals: cases in which an error of ours says what is not supported. A wrong answer, an error
that is none of ours, a crash and a hang cannot be listed. A case leaves it when it passes; one that passed is never
added.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.onnx_backend.cases import load_cases
from tests.onnx_backend.harness import run_cases

FOLDER = Path(__file__).parent
STOCK_PASSES = FOLDER / "stock_passes.json"
EXPECTED_FAILURES = FOLDER / "expected_failures.txt"
PACKAGES = ("apache-tvm", "apache-tvm-ffi", "onnx", "numpy")


def stock_passes() -> set[str]:
    """Cases that stock TVM passes, in the versions that the file names."""
    return set(json.loads(STOCK_PASSES.read_text())["cases"])


def expected_failures() -> list[str]:
    """Cases that we refuse, in the order of the file."""
    return EXPECTED_FAILURES.read_text().split()


def record_stock(workers: int) -> None:
    outcomes = run_cases(load_cases(), ["stock"], workers)["stock"]
    passed = [name for name, outcome in outcomes.items() if outcome == "pass"]
    record = {"versions": {name: version(name) for name in PACKAGES}, "total": len(outcomes), "cases": passed}
    _write(STOCK_PASSES, json.dumps(record, indent=1))
    print(f"stock TVM passes {len(passed)} of {len(outcomes)} cases")


def record_failures(system: str, workers: int) -> None:
    """Without a list yet, the first one; otherwise the list without what passes now."""
    outcomes = run_cases(load_cases(), [system], workers)[system]
    failed = {name for name, outcome in outcomes.items() if not outcome.startswith("pass")}
    refused = {name for name in failed if outcomes[name].startswith("refused")}
    known = set(expected_failures()) if EXPECTED_FAILURES.exists() else failed
    _write(EXPECTED_FAILURES, "\n".join(sorted(known & refused)))
    print(f"{len(refused)} cases are refused, {len(known & refused)} of them expected, {len(known - refused)} dropped")
    for name in sorted(failed - (known & refused)):
        print(f"to repair: {name}: {outcomes[name]}")


def _write(path: Path, text: str) -> None:
    """Complete or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text + "\n")
    os.replace(draft, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stock", "failures"])
    parser.add_argument("--system", default="ours", choices=["ours", "import"])
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.what == "stock":
        record_stock(given.workers)
    else:
        record_failures(given.system, given.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
