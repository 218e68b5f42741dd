"""Graphs that split tensors and join them again, for tests of what is copied."""

from __future__ import annotations

from tests.support.small_modules import inputs_of
from tvm_ext._tvm import IRModule, relax

op = relax.op


def pieces() -> IRModule:
    """What falls into rows, is computed row by row and joined again, in two steps: nothing needs to be copied."""
    x, y, z = inputs_of((8, 48), (48, 64), (64, 32))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y, z]):
        with builder.dataflow():
            rows = builder.emit(op.split(op.matmul(x, y), 4, axis=0))
            soft = [builder.emit(op.nn.softmax(rows[number])) for number in range(4)]
            again = op.nn.softmax(op.add(soft[1], soft[3]))
            joined = builder.emit(op.concat([op.concat([again, soft[2]]), op.concat([soft[0], soft[3]])]))
            results = [op.matmul(joined, z), op.nn.softmax(op.matmul(z, op.permute_dims(z)))]
            results = [builder.emit_output(item) for item in results]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()


def kept_pieces() -> IRModule:
    """The same where copies are needed: of results, of what is joined twice, of rows that share a line of the cache."""
    x, y, z = inputs_of((8, 48), (48, 64), (8, 5))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y, z]):
        with builder.dataflow():
            rows = builder.emit(op.split(op.matmul(x, y), 4, axis=0))
            soft = [builder.emit(op.nn.softmax(rows[number])) for number in range(3)]
            short = builder.emit(op.split(op.nn.softmax(z), 4, axis=0))
            narrow = op.concat([op.nn.softmax(short[0]), op.nn.softmax(short[1])])
            joined = [narrow, op.concat([soft[0], soft[1], soft[0]]), op.concat([soft[1], soft[2]])]
            results = [rows[3], soft[2], *(op.nn.softmax(item) for item in joined)]
            results = [builder.emit_output(item) for item in results]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()
