"""The part of a report on tuning: its curve lies where the numbers say, and its table says why."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.records.tuned import CurvePoint, TunedTask, TuningRecord
from tvm_ext.reports.tuning import tuning_curve, tuning_section

RECORD = TuningRecord(
    device="cpu",
    budget="200 trials",
    seed=0,
    trials=16,
    known=0,
    seconds=20.0,
    stopped="the budget of 200 trials is spent",
    tasks=(
        TunedTask(
            name="conv<2d>", workload="0", calls=2, share=0.8, candidates=100, known=17, failed=1, predicted_us=90.0,
            constructed_us=100.0, best_us=80.0, configuration="tile", reason="20 % faster & proven",
        ),
    ),
    curve=(
        CurvePoint(trials=0, seconds=0.0, best_us=200.0, limit_us=150.0),
        CurvePoint(trials=8, seconds=10.0, best_us=180.0, limit_us=150.0),
        CurvePoint(trials=16, seconds=20.0, best_us=160.0, limit_us=158.0),
    ),
    untuned=(("softmax", "it has no tiles to choose"),),
)  # fmt: skip


def points(svg: str, style: str) -> list[tuple[float, float]]:
    (line,) = (item for item in ElementTree.fromstring(svg).iter() if item.get("class") == style and item.get("points"))
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def test_the_curve_lies_where_its_numbers_say() -> None:
    svg = tuning_curve(RECORD)
    constructed, best, limit = (points(svg, style) for style in ("cache", "best", "limit"))
    assert best[0] == constructed[0]  # it begins at the constructed kernels
    assert best[-1][0] == constructed[-1][0] == limit[-1][0]
    per_us = (best[-1][1] - constructed[0][1]) / 40.0
    assert abs((limit[-1][1] - constructed[0][1]) - 42.0 * per_us) < 0.2
    assert [x for x, _ in best] == sorted(x for x, _ in best)


def test_labels_do_not_lie_on_each_other() -> None:
    labels = re.findall(r'class="label" x="[0-9.]+" y="([0-9.]+)"', tuning_curve(RECORD))
    places = sorted(map(float, labels))
    assert len(places) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(places)) > 15


def test_the_section_is_well_formed_and_says_why() -> None:
    text = tuning_section(RECORD)
    root = ElementTree.fromstring(text)
    words = "".join(root.itertext())
    assert "20 % faster & proven" in words
    assert "conv<2d>" in words
    assert "it has no tiles to choose" in words
    assert "1 of 1 kernels by measurement: 200 us a run to 160 us, 1.25 times as fast" in words


def test_a_run_without_a_trial_has_no_curve() -> None:
    knew = TuningRecord(**{name: getattr(RECORD, name) for name in ("device", "budget", "seed", "tasks", "stopped")},
                        trials=0, known=17, seconds=0.1, curve=RECORD.curve[:1])  # fmt: skip
    assert "the database knew enough" in tuning_section(knew)
    assert tuning_section(None) == ""


def test_records_survive_json() -> None:
    assert from_json(TuningRecord, to_json(RECORD)) == RECORD
