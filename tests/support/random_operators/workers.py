"""Runs random operators in worker processes (`case_workers`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..case_workers import Trial, run_trials
from .check import CaseResult, attempt, failure
from .record import OperatorCase

TRIAL: Trial[OperatorCase, CaseResult] = Trial(attempt=attempt, failure=failure)


def run_cases(cases: Iterable[OperatorCase], *, jobs: int, limit_s: float) -> Iterator[CaseResult]:
    """Results in the order in which they come; a case that runs for longer than ``limit_s`` seconds is ended."""
    return run_trials(cases, TRIAL, jobs=jobs, limit_s=limit_s)
