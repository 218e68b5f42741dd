"""The command ``tvm-ext cache``: the folder of compiled kernels."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .common import AsJson


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all kernels in it.")] = False, as_json: AsJson = False
) -> None:
    """Show where compiled kernels are kept and how much room they take, or delete them."""
    from tvm_ext.options import kernel_cache_directory
    from tvm_ext.support import kernel_cache

    folder = kernel_cache_directory()
    if folder is None:
        typer.echo('{"folder": null}') if as_json else typer.echo("the kernel cache is switched off")
        return
    deleted = kernel_cache.clear(folder) if clear else 0
    sizes = [size for _, size, _ in kernel_cache.entries(folder)]
    limit = kernel_cache.SIZE_LIMIT_BYTES
    if as_json:
        state = {"folder": str(folder), "kernels": len(sizes), "bytes": sum(sizes), "limit_bytes": limit}
        typer.echo(json.dumps({**state, "deleted": deleted}))
        return
    if clear:
        typer.echo(f"deleted {deleted} kernels")
    typer.echo(f"{folder}: {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB of at most {limit / 1e6:.0f} MB")
