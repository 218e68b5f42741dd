"""Where a measured time and the model's are far apart, and what may be the reason: the spread of the runs tells."""

from __future__ import annotations

from .record import BuildRecord, OperatorReport

FAR_APART = 3.0
"""A choice: models of time are seldom further from a quiet machine's."""
_UNSTEADY = 2.0  # a choice: slowest over fastest run, beyond what clocks and caches do by themselves
_SHORT_S = 10e-6  # a choice: below it a call and two readings of the clock weigh


def ratio(operator: OperatorReport) -> float | None:
    """Measured over predicted time of a call; None where one of them is not known."""
    if not operator.measured_s or not operator.predicted_s:
        return None
    return operator.measured_s / operator.predicted_s


def doubt(report: BuildRecord, operator: OperatorReport) -> str:
    """Why measured and predicted time may differ by more than `FAR_APART`; empty where they do not."""
    times = ratio(operator)
    if times is None or 1 / FAR_APART <= times <= FAR_APART:
        return ""
    much = f"{times:.3g} times the prediction" if times > 1 else f"1/{1 / times:.3g} of the prediction"
    return f"Measured: {much}. {_reason(report, operator, times)}"


def _reason(report: BuildRecord, operator: OperatorReport, times: float) -> str:
    assert operator.measured_s is not None
    fastest, slowest = operator.fastest_s, operator.slowest_s
    if fastest and slowest and slowest > _UNSTEADY * fastest:
        return (
            f"The runs differ by a factor of {slowest / fastest:.2g}: noise, or other processes. "
            "Measure again on a quiet machine."
        )
    if operator.measured_s < _SHORT_S:
        return "The call is so short that starting it and reading the clock weigh."
    whole = _overall(report)
    if whole is not None and whole > FAR_APART / 1.5 and times > 1:
        return (
            f"All kernels together take {whole:.2g} times their prediction: the machine is busy, or slower than its "
            "device row (`tvm-ext devices --measure`)."
        )
    agree = "The runs agree" if fastest else "Runs were not compared"
    if times < 1:
        return f"{agree}: its operands probably lie in a cache, where the model expects them in memory."
    if (report.bandwidth_share(operator) or 0.0) > 0.5:
        return f"{agree}: it reads cold memory at more than half of its bandwidth, where the model expects a cache."
    return f"{agree}: the model misjudges this shape. Tune the kernel (`tvm-ext tune`), or report it."


def _overall(report: BuildRecord) -> float | None:
    """Measured over predicted time of all kernels that have both."""
    both = [item for item in report.operators if ratio(item) is not None]
    measured = sum((item.measured_s or 0.0) * item.calls for item in both)
    predicted = sum((item.predicted_s or 0.0) * item.calls for item in both)
    return measured / predicted if len(both) > 1 and predicted else None
