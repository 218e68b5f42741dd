"""Servers behind a tracker: several at once, killed in mid-run, and trackers that are none."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.autotune import jobs
from tests.unit.autotune.test_runners import outcomes, processes_of
from tvm_ext.autotune.builders import ExecutorBuilder
from tvm_ext.autotune.kernel_host import KernelError
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.rpc_servers import main
from tvm_ext.autotune.runners import RpcRunner, TrackerFleet
from tvm_ext.autotune.tracker import RemoteDevice, Tracker
from tvm_ext.autotune.turns import DeviceLost
from tvm_ext.errors import MeasurementError, OptionError
from tvm_ext.records.kernel_job import TimingPlan

ROOT = Path(__file__).resolve().parents[3]
PLAN = TimingPlan(limit_s=60.0, least_rounds=2, most_rounds=3)
START_LIMIT_S = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Servers:
    """A tracker and servers on this machine, each in a process group of its own."""

    def __init__(self) -> None:
        self.tracker = Tracker("127.0.0.1", free_port())
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start("tracker", "--port", str(self.tracker.port))

    def add(self, count: int) -> None:
        there = len(self.current())
        for _ in range(count):
            self._start("server", "--tracker", str(self.tracker), "--key", "test")
        end = time.monotonic() + START_LIMIT_S
        while len(self.current()) < there + count:
            assert time.monotonic() < end, "the servers do not start"
            time.sleep(0.1)

    def current(self) -> list[str]:
        with contextlib.suppress(MeasurementError):
            return self.tracker.servers("test")
        return []

    def kill(self, number: int) -> None:
        """The server and the sessions that it has, as a power cut would."""
        process = self.processes[number]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for number in range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                self.kill(number)

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tvm_ext.autotune.rpc_servers", *arguments]
        self.processes.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL))


@pytest.fixture
def servers() -> Iterator[Servers]:
    before = processes_of(os.getpid())
    found = Servers()
    try:
        yield found
    finally:
        found.end()
    assert processes_of(os.getpid()).keys() <= before.keys()


def test_a_server_that_is_killed_costs_no_candidate_its_trial(servers: Servers) -> None:
    servers.add(2)
    names = [f"a{number}" for number in range(6)]
    with ThreadPoolExecutor(1) as executor:
        fleet = TrackerFleet(servers.tracker, "test")
        with Measurer(ExecutorBuilder(executor, 1), fleet, plan=PLAN, batch=2) as measurer:
            found = []
            for item in measurer.measure([jobs.job(name) for name in names]):
                if not found:
                    servers.kill(1)
                found.append(item)
    assert outcomes(found) == dict.fromkeys(names, "ok")


@pytest.mark.slow
def test_two_of_four_servers_are_killed_one_joins_and_every_trial_is_accounted_for(servers: Servers) -> None:
    servers.add(4)
    batch = [jobs.job(f"a{number}", jobs.repeated(number + 1)) for number in range(60)]
    batch[7:7] = [jobs.job("wrong", jobs.scaled(3.0)), jobs.job("crash", jobs.calling("abort"))]
    batch[20:20] = [jobs.job("hang", jobs.calling("pause"))]
    plan = TimingPlan(limit_s=15.0, least_rounds=2, most_rounds=3)
    with ThreadPoolExecutor(2) as executor:
        fleet = TrackerFleet(servers.tracker, "test")
        with Measurer(ExecutorBuilder(executor, 2), fleet, plan=plan, batch=4) as measurer:
            found = []
            for item in measurer.measure(batch):
                found.append(item)
                if len(found) in (5, 15):
                    servers.kill(1 if len(found) == 5 else 2)
                if len(found) == 25:
                    servers.add(1)
    wanted = {job.configuration: "ok" for job in batch}
    assert outcomes(found) == wanted | {"wrong": "wrong", "crash": "crashed", "hang": "timed_out"}
    assert len(measurer.report.devices) >= 4


@pytest.mark.parametrize("text", ["", "host", "host:", ":9190", "host:port", "host:70000", "host:0"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="no address of a tracker"):
        Tracker.parse(text)


def test_a_tracker_that_is_not_there_is_an_error_with_a_remedy() -> None:
    tracker = Tracker("127.0.0.1", free_port())
    with pytest.raises(MeasurementError, match=r"no tracker at 127.0.0.1:.*refused") as refused:
        tracker.servers("cpu")
    assert "rpc_servers tracker --host 127.0.0.1" in refused.value.remedy
    with (
        ThreadPoolExecutor(1) as executor,
        Measurer(ExecutorBuilder(executor, 1), TrackerFleet(tracker, "cpu")) as measurer,
        pytest.raises(MeasurementError, match="no tracker at"),
    ):
        list(measurer.measure([jobs.job("a")]))


def answering(answer: Callable[[socket.socket], None]) -> tuple[Tracker, threading.Thread]:
    """Something that listens like a tracker and says what ``answer`` sends to the first that calls."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                answer(connection)

    thread = threading.Thread(target=run)
    thread.start()
    return Tracker("127.0.0.1", listener.getsockname()[1]), thread


MAGIC = (0x2F271).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another protocol"),
        (b"", "closed the connection"),
        (MAGIC + (2**31 - 1).to_bytes(4, "little"), "an answer of 2147483647 bytes"),
        (MAGIC + (4).to_bytes(4, "little") + b"{{{{", "is no tracker"),
        (MAGIC + (4).to_bytes(4, "little") + b"[-1]", "is no tracker"),
        (MAGIC + (7).to_bytes(4, "little") + b"[0, {}]", "server_info"),
    ],
)
def test_what_listens_there_and_is_no_tracker_is_said(said: bytes, problem: str) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1024):
            pass

    tracker, thread = answering(answer)
    with pytest.raises(MeasurementError, match=problem):
        tracker.servers("cpu")
    thread.join()


def test_a_tracker_that_says_nothing_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow(connection: socket.socket) -> None:
        while connection.recv(1024):
            pass

    monkeypatch.setattr("tvm_ext.autotune.tracker.PATIENCE_S", 0.2)
    tracker, thread = answering(swallow)
    with pytest.raises(MeasurementError, match="did not answer in time"):
        tracker.request("cpu", 0.2)
    thread.join()


def test_a_session_that_ends_is_the_kernels_fault_only_where_its_server_is_still_there() -> None:
    class Known(Tracker):
        def servers(self, key: str) -> list[str]:
            return ["127.0.0.1:1"] if key == "there" else []

    ended = KernelError("crashed", "the session ended")
    for key, kind in (("there", KernelError), ("gone", DeviceLost)):
        runner = RpcRunner(Known("127.0.0.1", 1), key)
        runner.opened("127.0.0.1:1")
        assert isinstance(runner.judge(ended), kind)
        assert isinstance(runner.judge(KernelError("lost", "no server is free")), DeviceLost)
        assert isinstance(runner.judge(KernelError("wrong", "errs")), KernelError)


def test_a_tracker_without_tornado_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tvm.rpc.tracker", raising=False)
    monkeypatch.setitem(sys.modules, "tornado", None)
    assert main(["tracker", "--port", "1"]) == 2
    said = capsys.readouterr().err
    assert "needs the Python package tornado" in said
    assert "tvm-ext[rpc]" in said


def test_a_name_is_sent_to_a_session_once(tmp_path: Path) -> None:
    """For a name that a server has loaded, it returns what it was."""
    sent: list[str] = []
    session = SimpleNamespace(upload=lambda _path, name: sent.append(name), load_module=lambda name: name)
    device = RemoteDevice(session, None, "a server")
    assert [device.open(tmp_path / "kernel.so") for _ in range(3)] == sent
    assert len(set(sent)) == 3
    assert all(name.endswith(".so") for name in sent)


def test_a_port_that_is_taken_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert main(["server", "--port", port]) == 2
        assert main(["tracker", "--port", port]) == 2
    assert main(["server", "--tracker", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert said.count("can listen at 127.0.0.1:") == 2
    assert "remedy: name another port" in said
