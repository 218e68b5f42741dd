"""What we ask of TVM's RPC tracker: which servers there are, and for one of them. Every answer has a time limit.

TVM's own client waits for a minute where nobody listens, and for ever for an answer.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_ext._tvm import RPC_TRACKER_MAGIC, Device, Module, RpcCode, rpc
from tvm_ext.errors import MeasurementError, OptionError

from .kernel_host import BIG_CORES, CONFIGURE_POOL, KERNEL_ERRORS, KernelError, first_line

MOST_REPLY_BYTES = 1 << 20  # a choice: above any summary; bounds what a foreign server can make us hold
PATIENCE_S = 5.0  # a choice: a tracker answers in milliseconds


@dataclass(frozen=True, slots=True)
class Tracker:
    """The tracker that listens at ``host:port``. It knows no passwords: whoever reaches it can use its devices."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Tracker:
        """From "host:port"; raises OptionError for anything else."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise OptionError(
                f"{text!r} is no address of a tracker.", "name one as host:port, for example 127.0.0.1:9190"
            )
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def servers(self, key: str) -> list[str]:
        """Addresses of the servers of ``key`` that are there now; raises MeasurementError without a tracker."""
        summary = self._ask([RpcCode.SUMMARY], PATIENCE_S)
        try:
            found = [(item["key"], item["addr"]) for item in summary["server_info"]]
            return sorted(f"{address[0]}:{address[1]}" for name, address in found if name == f"server:{key}")
        except (KeyError, TypeError, IndexError) as error:
            raise self._strange(repr(error)) from error

    def request(self, key: str, wait_s: float) -> tuple[str, int, str]:
        """Host, port and password of the next free server of ``key``.

        Raises MeasurementError where there is none within ``wait_s``, or no tracker.
        """
        value = self._ask([RpcCode.REQUEST, key, "", 1], wait_s)
        if not isinstance(value, list) or len(value) != 3:
            raise self._strange(repr(value)[:100])
        return str(value[0]), int(value[1]), str(value[2])

    def _ask(self, question: list[object], wait_s: float) -> Any:
        try:
            with socket.create_connection((self.host, self.port), PATIENCE_S) as connection:
                connection.sendall(struct.pack("<i", RPC_TRACKER_MAGIC))
                if struct.unpack("<i", _read(connection, 4))[0] != RPC_TRACKER_MAGIC:
                    raise self._strange("its greeting is another protocol's")
                text = json.dumps(question).encode()
                connection.sendall(struct.pack("<i", len(text)) + text)
                reply = self._reply(connection, wait_s)
        except TimeoutError as error:
            raise MeasurementError(
                f"the tracker at {self} did not answer in time.",
                "see that a server of that key is free: python -m tvm.exec.query_rpc_tracker",
            ) from error
        except OSError as error:
            raise MeasurementError(
                f"there is no tracker at {self}: {error.strerror or error}.",
                f"start one: python -m tvm_ext.autotune.rpc_servers tracker --host {self.host} --port {self.port}",
            ) from error
        if not isinstance(reply, list) or len(reply) != 2 or reply[0] != RpcCode.SUCCESS:
            raise self._strange(repr(reply)[:100])
        return reply[1]

    def _reply(self, connection: socket.socket, wait_s: float) -> Any:
        """The answer, all of which must come within ``wait_s``."""
        connection.settimeout(wait_s)
        size = struct.unpack("<i", _read(connection, 4))[0]
        if not 0 < size <= MOST_REPLY_BYTES:
            raise self._strange(f"an answer of {size} bytes")
        try:
            return json.loads(_read(connection, size))
        except ValueError as error:
            raise self._strange(str(error)) from error

    def _strange(self, what: str) -> MeasurementError:
        return MeasurementError(f"what listens at {self} is no tracker of this TVM: {what}.", "check host and port")


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes; TimeoutError after the connection's limit for all of them, ConnectionError where it closes."""
    limit_s = connection.gettimeout() or PATIENCE_S
    end = time.monotonic() + limit_s
    data = b""
    while len(data) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        read = connection.recv(count - len(data))
        if not read:
            raise ConnectionResetError(None, "it closed the connection")
        data += read
    connection.settimeout(limit_s)
    return data


# --- A device behind one of TVM's RPC servers, as the process that talks to it sees it --------------------------------
_numbers = itertools.count(1)


@dataclass(slots=True)
class RemoteDevice:
    """A session with one server; ``name`` is its address. Times are taken over there."""

    session: Any
    device: Device
    name: str
    own_clock: bool = False

    def open(self, library: Path) -> Module:
        name = f"{next(_numbers)}_{library.name}"  # for one that it has loaded, a server returns what it was
        self.session.upload(str(library), name)
        return self.session.load_module(name)

    def use_threads(self, count: int) -> int:
        """Of the server's session, which otherwise takes all of its cores."""
        self.session.get_function(CONFIGURE_POOL)(BIG_CORES, count)
        return int(self.session.get_function("runtime.NumThreads")())

    def is_there(self) -> bool:
        try:
            self.session.get_function("tvm.rpc.server.workpath")
        except KERNEL_ERRORS:
            return False
        return True


def connect(tracker: str, key: str, kind: str, wait_s: float, session_s: float) -> RemoteDevice:
    """A session with the next free server of ``key``, which ends it after ``session_s``.

    Raises KernelError "lost" where no server is free within ``wait_s``, or it is gone when it is called.
    """
    try:
        host, port, match = Tracker.parse(tracker).request(key, wait_s)
        session = rpc.connect(host, port, match, session_timeout=session_s)
        return RemoteDevice(session, session.device(kind, 0), f"{host}:{port}")
    except KERNEL_ERRORS as error:
        raise KernelError("lost", first_line(error)) from error
