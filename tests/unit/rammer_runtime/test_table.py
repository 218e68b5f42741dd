from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest

from tests.unit.rammer_runtime.tables import chain, needs_runtime
from tvm_ext.rammer_runtime import native
from tvm_ext.rammer_runtime.table import Buffer, Entry, ExecutionTable, Parameter, one_after_another

TABLE = chain(4, 2)
KERNEL, CALL = TABLE.kernels[0], TABLE.calls[0]


def _first_entry(**changes: object) -> ExecutionTable:
    first, *rest = TABLE.streams[0]
    return replace(TABLE, streams=((replace(first, **changes), *rest), *TABLE.streams[1:]))


def _first_call(**changes: object) -> ExecutionTable:
    return replace(TABLE, calls=(replace(CALL, **changes), *TABLE.calls[1:]))


UNSOUND = {
    "its function has no name": replace(TABLE, name=""),
    "it has no units": replace(TABLE, streams=()),
    "its arena is too large": replace(TABLE, arena_bytes=1 << 60),
    "the alignment of an argument is no power": replace(
        TABLE, arguments=(replace(TABLE.arguments[0], alignment=3), *TABLE.arguments[1:])
    ),
    "two kernels have one name": replace(TABLE, kernels=(KERNEL, KERNEL)),
    "a kernel has no rTasks": replace(TABLE, kernels=(replace(KERNEL, tasks=0),)),
    "a kernel has no proper name": replace(TABLE, kernels=(replace(KERNEL, symbol="a\0b"),)),
    "a buffer lies in no argument": replace(TABLE, buffers=(Buffer(argument=3, bytes=0), *TABLE.buffers[1:])),
    "a buffer reaches beyond": replace(TABLE, buffers=(Buffer(offset=1 << 63, bytes=1 << 63), *TABLE.buffers[1:])),
    "a call is of no kernel": _first_call(kernel=1),
    "a call has too few": _first_call(buffers=(0, 1)),
    "a call is given no buffer": _first_call(buffers=(0, 1, 99)),
    "a buffer is smaller": replace(TABLE, kernels=(replace(KERNEL, parameters=(Parameter(bytes=257),) * 3),)),
    "a buffer is not aligned": replace(
        TABLE, kernels=(replace(KERNEL, parameters=(Parameter(bytes=1, alignment=128),) * 3),)
    ),
    "an entry calls nothing": _first_entry(call=4),
    "an entry runs rTasks": _first_entry(end=5),
    "an entry waits for no unit": _first_entry(waits=((2, 0),)),
    "an entry waits for more": _first_entry(waits=((1, 9),)),
    "its waits form a circle": _first_entry(waits=((1, 8),)),
}


@needs_runtime
@pytest.mark.parametrize("reason", UNSOUND)
def test_an_unsound_table_is_refused(reason):
    with pytest.raises(ValueError, match=f"this schedule of rTasks cannot be used: {reason}"):
        native.make_module(UNSOUND[reason], [])


@needs_runtime
def test_an_entry_that_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match="circle"):
        native.make_module(_first_entry(waits=((0, 1),)), [])


@needs_runtime
def test_every_flipped_bit_and_every_cut_is_refused():
    data = TABLE.to_bytes()
    native.module_of_bytes(data, [])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="cannot be used"):
            native.module_of_bytes(bytes(flipped), [])
    for length in range(len(data)):
        with pytest.raises(ValueError, match="cannot be used"):
            native.module_of_bytes(data[:length], [])


@needs_runtime
def test_a_newer_version_is_named():
    data = TABLE.to_bytes()
    with pytest.raises(ValueError, match="it is of version 2, and this runtime reads version 1"):
        native.module_of_bytes(data[:8] + struct.pack("<I", 2) + data[12:], [])


@needs_runtime
def test_hostile_counts_are_refused_before_memory_is_taken():
    data = TABLE.to_bytes()
    payload = bytearray(data[24:])
    for place in range(len(payload) - 4):
        hostile = bytes(payload[:place]) + struct.pack("<I", 0x7FFFFFFF) + bytes(payload[place + 4 :])
        header = data[:12] + struct.pack("<IQ", zlib.crc32(hostile), len(hostile))
        try:
            native.module_of_bytes(header + hostile, [])
        except ValueError as error:
            assert "cannot be used" in str(error)  # noqa: PT017 - some changes are harmless: a larger argument


def test_programs_run_one_after_another():
    first = ((Entry(call=0, begin=0, end=1),), (Entry(call=0, begin=1, end=2),))
    second = ((Entry(call=1, begin=0, end=1),), (Entry(call=1, begin=1, end=2, waits=((0, 1),)),))
    third = ((), (Entry(call=2, begin=0, end=1),))
    joined = one_after_another([first, second, third])
    assert [[entry.waits for entry in stream] for stream in joined] == [[(), ((1, 1),)], [(), ((0, 2),), ((0, 2),)]]
    assert one_after_another([]) == ()
