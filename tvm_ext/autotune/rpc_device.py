"""A device behind one of TVM's RPC servers, as the process that talks to it sees it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_ext._tvm import Device, Module, rpc

from .kernel_host import BIG_CORES, CONFIGURE_POOL, KERNEL_ERRORS, KernelError, first_line
from .tracker import Tracker

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
