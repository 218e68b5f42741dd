"""MetaSchedule without its measurements: stock TVM's search on real schedules, whose "times" are made up."""

from __future__ import annotations

import importlib
import logging
from typing import Any

LOGGER = "tvm.s_tir.meta_schedule"


def dummy_parts(population: int = 8) -> dict[str, Any]:
    """Arguments of `tune_tir` and `tune_relax`: nothing is compiled or run, and few candidates are looked at.

    Importing them takes seconds: stock TVM parses its intrinsics. A run sets up its log by the names of the handlers
    that it finds, and trips over those of pytest, which have none.
    """
    importlib.import_module("tvm.s_tir.tensor_intrin")
    from tvm.s_tir.meta_schedule.measure_callback import AddToDatabase, UpdateCostModel
    from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch
    from tvm.s_tir.meta_schedule.testing.dummy_object import DummyBuilder, DummyRunner

    logging.getLogger(LOGGER).handlers.clear()
    return {
        "builder": DummyBuilder(),
        "runner": DummyRunner(),
        "strategy": EvolutionarySearch(
            population_size=population,
            init_measured_ratio=0.2,
            init_min_unmeasured=population // 2,
            genetic_num_iters=1,
        ),
        "measure_callbacks": [AddToDatabase(), UpdateCostModel()],
    }
