"""The lock of whatever stock TVM can do for one thread at a time: importing a model, running passes."""

from __future__ import annotations

from tvm_ext import errors, forks


class _Exclusive(forks.ForkAwareLock):
    """What it guards runs kernels. Whether it can be taken is asked first: that answer does not hang on timing."""

    def __enter__(self) -> None:
        forks.watch()
        super().__enter__()
        try:
            forks.require_pool()
        except errors.ForkError:
            self.give()
            raise


EXCLUSIVE = _Exclusive(
    errors.ForkError(
        "this process was forked while another thread imported or built a model, and can do neither.",
        'fork before or after, or spawn the process (multiprocessing.get_context("spawn"))',
    )
)
"""Held while stock TVM imports a model or runs passes: of the scopes that these open (`relax.BlockBuilder._stack`,
`te.tag.TagScope`) there is one for the whole process, so that two threads would write into each other's functions.
Kernels are lowered and compiled without it."""
