"""Drives the report's page in a headless Chromium: it lays out, sorts, and raises no script error, in light and dark.

A script appended to the page clicks a column's heading and writes what it saw into the document, which Chromium prints.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from benchmarks.networks import models
from tvm_ext import relay
from tvm_ext.reports.report import BuildReport

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=2000",
)  # fmt: skip

PROBE = """
<script>
const seen = { errors: [] };
window.addEventListener("error", (event) => seen.errors.push(event.message));
const column = (name) => [...document.querySelectorAll("#operators th")].findIndex((th) => th.textContent === name);
const cells = (name) => [...document.querySelectorAll("#operators tbody tr")].map((row) => row.cells[column(name)]);
const click = (name) => document.querySelectorAll("#operators th")[column(name)].querySelector("button").click();
click("GFLOP");
seen.descending = cells("GFLOP").map((cell) => Number(cell.dataset.value));
click("GFLOP");
seen.ascending = cells("GFLOP").map((cell) => Number(cell.dataset.value));
seen.order = document.querySelectorAll("#operators th")[column("GFLOP")].getAttribute("aria-sort");
click("Operator");
seen.names = cells("Operator").map((cell) => cell.dataset.name);
const words = document.querySelector("#find-words"), rows = () => [...document.querySelectorAll("#operators tbody tr")];
words.value = "WORD";
words.dispatchEvent(new Event("input"));
seen.found = rows().filter((row) => row.offsetParent !== null).map((row) => row.cells[0].dataset.name);
words.value = "";
words.dispatchEvent(new Event("input"));
seen.shown = rows().filter((row) => row.offsetParent !== null).length;
const bars = [...document.querySelectorAll("#operator-bars .bar")];
seen.bar = Math.min(...bars.map((bar) => bar.getBoundingClientRect().width));
seen.cut = [...document.querySelectorAll("#operators td.reason")].filter((cell) =>
  cell.scrollWidth > cell.clientWidth + 1 || cell.getBoundingClientRect().right > window.innerWidth).length;
const label = document.querySelector("svg text.label"), size = parseFloat(getComputedStyle(label).fontSize);
seen.text = size * label.ownerSVGElement.getBoundingClientRect().width / label.ownerSVGElement.viewBox.baseVal.width;
seen.overflow = document.documentElement.scrollWidth - window.innerWidth;
seen.background = getComputedStyle(document.body).backgroundColor;
seen.ink = getComputedStyle(document.body).color;
const plot = document.querySelector("svg:not(.calls)").getBoundingClientRect();
seen.outside = [...document.querySelectorAll("svg circle")].filter((circle) => {
  const box = circle.getBoundingClientRect();
  const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
  return x < plot.left || x > plot.right || y < plot.top || y > plot.bottom;
}).length;
seen.circles = document.querySelectorAll("svg circle").length;
seen.bars = document.querySelectorAll("#operator-bars .bar i").length;
seen.requests = performance.getEntriesByType("resource").length;
document.documentElement.dataset.seen = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def report() -> BuildReport:
    model = models.build_model("mobilenet_block")
    mod, params = relay.frontend.from_onnx(model)
    library = relay.build(mod, params=params)
    return library.profile(models.random_inputs(model), repeat=1)


def look(report: BuildReport, folder: Path, *flags: str) -> dict[str, Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    page = folder / "report.html"
    probe = PROBE.replace("WORD", report.operators[0].name)
    page.write_text(report.to_html().replace("</body>", probe + "</body>"))
    profile = folder / "profile"
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-seen="([^"]*)"', result.stdout)
    assert found, result.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(found.group(1)))
    return seen


def brightness(colour: str) -> float:
    """Mean of an ``rgb(r, g, b)``'s channels."""
    channels = [int(value) for value in re.findall(r"\d+", colour)[:3]]
    return sum(channels) / 3


def test_sorting_layout_and_errors(report: BuildReport, tmp_path: Path) -> None:
    seen = look(report, tmp_path, "--window-size=1400,2000")
    assert seen["errors"] == []
    assert seen["requests"] == 0
    assert len(seen["descending"]) == len(report.operators)
    assert seen["descending"] == sorted(seen["descending"], reverse=True)
    assert seen["ascending"] == sorted(seen["ascending"])
    assert seen["order"] == "ascending"
    assert sorted(seen["names"]) == sorted(operator.name for operator in report.operators)
    assert seen["found"]
    assert len(seen["found"]) < len(report.operators)
    assert all(report.operators[0].name in name for name in seen["found"])
    assert seen["shown"] == len(report.operators)
    assert seen["bars"] == len(report.operators)
    assert seen["circles"] > 0
    assert seen["outside"] == 0


@pytest.mark.parametrize("width", [500, 1000, 1280])  # a headless Chromium is no narrower than 500
def test_the_page_fits_its_width(report: BuildReport, tmp_path: Path, width: int) -> None:
    """It does not scroll sideways, bars have room, reasons are whole, and the roofline's text can be read."""
    seen = look(report, tmp_path, f"--window-size={width},1000")
    assert seen["overflow"] <= 0
    assert seen["bar"] > 150
    assert seen["cut"] == 0
    assert seen["text"] > 9


@pytest.mark.parametrize(("scheme", "is_dark"), [("0", True), ("1", False)])
def test_light_and_dark_have_contrast(report: BuildReport, tmp_path: Path, scheme: str, is_dark: bool) -> None:
    seen = look(report, tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    background, ink = brightness(seen["background"]), brightness(seen["ink"])
    assert (background < ink) == is_dark
    assert abs(background - ink) > 150
