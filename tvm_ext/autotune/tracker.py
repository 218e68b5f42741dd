"""What we ask of TVM's RPC tracker: which servers there are, and for one of them. Every answer has a time limit.

TVM's own client waits for a minute where nobody listens, and for ever for an answer.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from tvm_ext._tvm import RPC_TRACKER_MAGIC, RpcCode
from tvm_ext.errors import MeasurementError, OptionError

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
