"""Our cost model in stock TVM's MetaSchedule: it runs there, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te

from benchmarks.trace_model.learner import TraceLearner, cost_model_for_metaschedule
from tests.unit.dummy_metaschedule import dummy_parts
from tvm_ext.errors import ExportError, InputError

RNG = np.random.default_rng(0)


def candidates(count: int) -> tuple[list[Any], list[float]]:
    """Features of candidates with one to three stores, and times that two of the features decide."""
    stores = [RNG.uniform(0, 8, size=(int(RNG.integers(1, 4)), 20)) for _ in range(count)]
    return stores, [float(1e-3 * np.exp(0.3 * own[:, 3].max() - 0.2 * own[:, 7].mean())) for own in stores]


def test_it_learns_from_few_trials_and_ranks_others() -> None:
    learner = TraceLearner()
    seen, times = candidates(64)
    others, expected = candidates(100)
    assert np.ptp(learner.scores("one", others)) == 0
    learner.learn("one", seen, times)
    scores = learner.scores("one", others)
    assert np.corrcoef(scores, -np.log(expected))[0, 1] > 0.7
    assert (scores > 0).all()


def test_failures_teach_and_what_has_no_stores_is_left_out() -> None:
    learner = TraceLearner()
    seen, times = candidates(40)
    bad = [own[:, 5].max() > 6 for own in seen]
    learner.learn(
        "one", [*seen, np.empty((0, 20))], [*(None if b else t for b, t in zip(bad, times, strict=True)), 1.0]
    )
    assert len(learner) == 40
    others, _ = candidates(100)
    fails = np.array([own[:, 5].max() > 6 for own in others])
    scores = learner.scores("one", [*others, np.empty((0, 20))])
    assert scores[-1] == 0
    assert scores[:-1][fails].mean() < scores[:-1][~fails].mean()


def test_what_was_learnt_is_kept(tmp_path: Path) -> None:
    learner, again = TraceLearner(), TraceLearner()
    seen, times = candidates(20)
    learner.teach("one", seen, times)
    learner.learn("one", seen[:10], times[:10])
    learner.learn("two", seen[10:], [None, *times[11:]])
    learner.save(tmp_path / "kept")
    again.load(tmp_path / "kept")
    others, _ = candidates(10)
    assert np.array_equal(again.scores("one", others), learner.scores("one", others))
    (tmp_path / "other").write_text("no such file")
    with pytest.raises(InputError, match="holds no trials"):
        again.load(tmp_path / "other")


def test_what_it_is_taught_orders_what_it_has_not_seen() -> None:
    learner = TraceLearner()
    sampled, times = candidates(200)
    learner.teach("one", sampled, times)
    others, expected = candidates(100)
    assert np.corrcoef(learner.scores("one", others), 1 / np.array(expected))[0, 1] > 0.7
    assert np.ptp(learner.scores("two", others)) == 0 and learner.is_taught("one") and not learner.is_taught("two")


def test_trials_correct_what_was_taught_and_leave_the_rest_in_order() -> None:
    """What is high in feature 5 is three times slower than predicted; feature 3 orders the others as before."""
    learner = TraceLearner()
    sampled, times = candidates(300)
    learner.teach("one", sampled, times)
    seen, near = candidates(60)
    slower = [time * (3.0 if own[:, 5].max() > 5 else 1.0) for own, time in zip(seen, near, strict=True)]
    learner.learn("one", seen, slower)
    others, expected = candidates(200)
    slow = np.array([own[:, 5].max() > 5 for own in others])
    off = np.log(learner.scores("one", others)) + np.log(expected)
    assert off[slow].mean() < off[~slow].mean() - 0.2
    kept = np.corrcoef(learner.scores("one", others)[~slow], 1 / np.array(expected)[~slow])[0, 1]
    assert kept > 0.6


@pytest.mark.slow  # stock TVM parses its CUDA intrinsics first, some 30 s
@pytest.mark.parametrize("kept", [0, 4, 0.5, 0.97])
def test_half_a_file_is_refused_with_a_remedy(kept: float, tmp_path: Path) -> None:
    learner = TraceLearner()
    learner.learn("one", *candidates(8))
    learner.save(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "half").write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(InputError, match="half holds no trials"):
        learner.load(tmp_path / "half")


def test_saving_leaves_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = TraceLearner()
    learner.learn("one", *candidates(8))
    learner.save(tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    learner.learn("two", *candidates(8))
    with pytest.raises(ExportError, match="No space left"):
        learner.save(tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == before


@pytest.mark.slow  # stock TVM parses its CUDA intrinsics first
def test_metaschedule_tunes_with_it(tmp_path: Path) -> None:
    """A run whose "times" are made up: nothing is compiled, all else is stock TVM's."""
    from tvm.s_tir import meta_schedule

    a, b = te.placeholder((16, 16), name="a"), te.placeholder((16, 16), name="b")
    k = te.reduce_axis((0, 16), name="k")
    c = te.compute((16, 16), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    learner = TraceLearner()
    database = meta_schedule.tir_integration.tune_tir(
        te.create_prim_func([a, b, c]), tvm.target.Target({"kind": "llvm", "num-cores": 2}), str(tmp_path), 4,
        num_trials_per_iter=2, database="memory", cost_model=cost_model_for_metaschedule(learner), num_tuning_cores=1,
        seed=0, **dummy_parts(4),
    )  # fmt: skip
    assert len(database) >= 4
    assert len(learner) >= 4
    assert learner._correction is not None
    assert len(learner._lessons) == 1


def test_a_model_is_tuned_with_it_and_stays_right(tmp_path: Path) -> None:
    """`tune_relax` on two operators: each is taught its own lesson, and what is applied computes the same."""
    from tvm.s_tir import meta_schedule

    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (24, 32)), ("w", (32, 40))))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = builder.emit(relax.op.nn.relu(relax.op.matmul(x, w)))
            result = builder.emit_output(relax.op.nn.softmax(product))
        builder.emit_func_output(result)
    learner = TraceLearner()
    with target:
        mod = relax.get_pipeline("zero")(builder.get())
        meta_schedule.relax_integration.tune_relax(
            mod, {}, target, str(tmp_path), 8, num_trials_per_iter=4,
            cost_model=cost_model_for_metaschedule(learner), seed=0, **dummy_parts(16),
        )  # fmt: skip
        tuned = relax.transform.MetaScheduleApplyDatabase(str(tmp_path))(mod)
    assert len(learner) == 8 and len(learner._lessons) == 2
    assert all(np.ptp(lesson.predicted_s) > 0 for lesson in learner._lessons.values())
    names = [name for _, func in tuned.functions_items() if (name := func.attrs.get("tirx.is_scheduled"))]
    assert len(names) == 2
    arrays = [RNG.standard_normal(shape).astype("float32") for shape in ((24, 32), (32, 40))]
    machine = relax.VirtualMachine(tvm.compile(tuned, target), tvm.cpu())
    found = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    powers = np.exp(np.maximum(arrays[0] @ arrays[1], 0))
    np.testing.assert_allclose(found, powers / powers.sum(axis=-1, keepdims=True), rtol=1e-4)
