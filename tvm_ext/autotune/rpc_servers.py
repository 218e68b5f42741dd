"""TVM's RPC tracker and server, as a fleet that measures needs them: on loopback unless told otherwise.

    python -m tvm_ext.autotune.rpc_servers tracker --port 9190
    python -m tvm_ext.autotune.rpc_servers server --tracker 127.0.0.1:9190 --key cpu

TVM's RPC has no authentication: whoever reaches a server can run any code there as its user. What differs from
`tvm.exec.rpc_server`: that one ends with the first session whose process a kernel crashes, and waits for a kernel that
hangs until the session's time is over. This one goes on after either, as soon as the client has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import multiprocessing
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_ext._tvm import rpc_listen, rpc_serve_loop, rpc_tracker, tvm
from tvm_ext.errors import MeasurementError, TvmExtError

from .tracker import Tracker

LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.2  # a choice: how late the end of a session is noticed
_GRACE_S = 1.0  # a choice: what closing a session may take; one that takes longer is killed
_LOG = logging.getLogger("tvm_ext.rpc")


def serve_tracker(host: str, port: int) -> None:
    """Be a tracker until the process ends; raises MeasurementError where the port is taken.

    UnsupportedEnvironmentError where a package is missing that TVM's tracker needs.
    """
    try:
        thread = rpc_tracker(host, port)
    except (ValueError, OSError) as error:
        raise MeasurementError(f"no tracker can listen at {host}:{port}: {error}.", "name another port") from error
    thread.join()


def serve(tracker: Tracker, key: str, host: str, port: int) -> None:
    """Serve sessions one after another until the process ends; ``port`` of 0 is any free one.

    Raises MeasurementError where the port is taken.
    """
    try:
        listener = socket.create_server((host, port), backlog=1)
    except OSError as error:
        raise MeasurementError(f"no server can listen at {host}:{port}: {error}.", "name another port") from error
    with listener:
        # The address that the tracker hands out: what is bound to all of them has to be found out by the tracker.
        shown = None if host in ("", "0.0.0.0", "::") else host
        chosen = listener.getsockname()[1]
        rpc_listen(listener, chosen, key, (tracker.host, tracker.port), None, shown, serve=_serve_session)


def _serve_session(peer: socket.socket, address: object, options: Mapping[str, float], libraries: Any) -> None:
    """Stands in for `tvm.rpc.server._serving`: one client, in a process of its own, until either has gone."""
    folder = tvm.support.utils.tempdir()
    with peer:
        session = multiprocessing.get_context("fork").Process(target=_session, args=(peer, libraries, folder))
        session.start()
        left_s = options.get("timeout") or float("inf")
        while session.is_alive() and left_s > 0 and not _has_gone(peer):
            session.join(_LOOK_EVERY_S)
            left_s -= _LOOK_EVERY_S
        if left_s > 0:
            session.join(_GRACE_S)  # a client that closes has the session close, too
        if session.is_alive():
            _LOG.warning("the session of %s is ended: its client has gone, or its time is over", address)
            session.kill()
        session.join()
        if session.exitcode:
            _LOG.warning("the session of %s ended with %s", address, session.exitcode)
    with contextlib.suppress(OSError):
        folder.remove()


def _session(peer: socket.socket, libraries: Any, folder: Any) -> None:
    os.chdir(folder.path)
    rpc_serve_loop(peer, libraries, folder)


def _has_gone(peer: socket.socket) -> bool:
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    return bool(poll.poll(0))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the exit status."""
    parser = argparse.ArgumentParser(description="A tracker, or a server that runs kernels for whoever measures.")
    parser.add_argument("role", choices=("tracker", "server"))
    parser.add_argument("--host", default=LOOPBACK, help="the address to listen at; nothing asks for a password there")
    parser.add_argument("--port", type=int, default=None, help="default: 9190 for a tracker, any free one for a server")
    parser.add_argument("--tracker", default="127.0.0.1:9190", help="where a server reports, as host:port")
    parser.add_argument("--key", default="cpu", help="what kind of device a server has")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    if not _is_loopback(chosen.host):
        _LOG.warning("whoever reaches %s can run code as this user: TVM's RPC has no authentication", chosen.host)
    try:
        if chosen.role == "tracker":
            serve_tracker(chosen.host, 9190 if chosen.port is None else chosen.port)
        else:
            serve(Tracker.parse(chosen.tracker), chosen.key, chosen.host, chosen.port or 0)
    except TvmExtError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
