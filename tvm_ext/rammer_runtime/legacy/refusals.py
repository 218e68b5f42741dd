"""What plain CUDA kernels may say that means something else, or nothing, inside a persistent kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tvm_ext.devices.gpu import WARP
from tvm_ext.errors import InputError

from .tokens import CudaFunction, Token, next_place

_REFUSED = {
    "cooperative_groups": ("cooperative groups", "use __syncthreads, and a kernel for each part between grid barriers"),
    "cudaGridDependencySynchronize": ("programmatic dependent launch", "leave it out: schedules order kernels"),
    "cudaTriggerProgrammaticLaunchCompletion": (
        "programmatic dependent launch",
        "leave it out: schedules order kernels",
    ),
    "__cluster_dims__": ("clusters of blocks", "a kernel without them"),
    "__syncthreads_count": ("a barrier that counts", "reduce in shared memory"),
    "__syncthreads_and": ("a barrier that votes", "reduce in shared memory"),
    "__syncthreads_or": ("a barrier that votes", "reduce in shared memory"),
    "__barrier_sync": ("a numbered barrier", "use __syncthreads"),
}
_ASSEMBLY = re.compile(
    r"\b(?:bar|barrier)\.|%(?:n?ctaid|n?tid|warpid|clusterid|smid)\b|\bexit\b|\.nc\b|griddepcontrol|cp\.async\.bulk|mbarrier"
)
_WARP_WORDS = re.compile(
    r"__(?:shfl|ballot|any|all|match|reduce)_\w*sync\b|__(?:shfl(?:_\w+)?|ballot|any|all|syncwarp|activemask)$|wmma$|mma$"
)


def check_source(tokens: Sequence[Token], kernel: str) -> None:
    """Raises InputError for what no function of the source may use."""
    for position, token in enumerate(tokens):
        words = [token.text] if token.kind == "word" else re.findall(r"\w+", token.text) * (token.kind == "directive")
        for word in words:
            if word in _REFUSED:
                what, remedy = _REFUSED[word]
                raise InputError(f"kernel {kernel}: {what} ({word}) have no meaning in a persistent kernel", remedy)
        following = next_place(tokens, position + 1)
        after = tokens[following].text if following < len(tokens) else ""
        if token.kind == "word" and token.text in ("texture", "surface") and after == "<":
            raise InputError(
                f"kernel {kernel}: a {token.text} reference, which CUDA 12 lacks too", "read global memory"
            )
        if token.kind == "text" and _ASSEMBLY.search(token.text) and _is_assembly(tokens, position):
            found = _ASSEMBLY.search(token.text)
            what = f"kernel {kernel}: assembly that says {found[0] if found else ''} cannot be moved"
            raise InputError(what, "use CUDA's built-in variables and __syncthreads")


def _is_assembly(tokens: Sequence[Token], place: int) -> bool:
    """Whether a text is in a statement that begins with ``asm``."""
    for token in reversed(tokens[:place]):
        if token.text in ("asm", "__asm__", "__asm"):
            return True
        if token.text in (";", "{", "}"):
            return False
    return False


def check_launches(tokens: Iterable[Token], kernel: str) -> None:
    """Raises InputError where device code launches kernels."""
    if any(token.text == "<<<" for token in tokens):
        raise InputError(f"kernel {kernel}: dynamic parallelism (<<<) is not possible inside a schedule")


def check_threads(
    tokens: Sequence[Token], kernel: CudaFunction, functions: Sequence[CudaFunction], *, threads: int, whole_warps: bool
) -> bool:
    """Whether threads may leave before others meet; raises InputError where that cannot be arranged for.

    ``functions`` are those that the kernel may call, ``whole_warps``: threads that return early do so by warps.
    """
    body = tokens[kernel.body[0] : kernel.body[1]]
    everything = [token for item in (kernel, *functions) for token in tokens[item.body[0] : item.body[1]]]
    directives = [token.text for token in tokens if token.kind == "directive"]
    meets = any(token.text == "__syncthreads" for token in everything) or any("__syncthreads" in x for x in directives)
    returns = any(token.kind == "word" and token.text == "return" for token in body)
    ragged = threads % WARP != 0
    used = {token.text for token in body if token.kind == "word"}
    if used & _returning(directives):
        raise InputError(f"kernel {kernel.name}: a macro that returns", "write the return where it takes place")
    exchanges = next((token.text for token in everything if token.kind == "word" and _WARP_WORDS.match(token.text)), "")
    if exchanges and ragged:
        what = f"kernel {kernel.name} uses {exchanges} with {threads} threads, and the last warp is not whole"
        raise InputError(what, "a number of threads that is a multiple of 32")
    if exchanges and returns and not whole_warps:
        what = f"kernel {kernel.name} uses {exchanges}, and returns early: who returned would be waited for"
        raise InputError(what, "a condition around the work, or whole_warps_return=True where whole warps return")
    votes = meets and (returns or ragged)
    if votes and returns and _has_lambda(body):
        what = f"kernel {kernel.name} has barriers, early returns and lambdas, whose returns are not told apart"
        raise InputError(what, "a device function instead of the lambda")
    return votes


def _returning(directives: Iterable[str]) -> set[str]:
    """Names of the macros that return, by themselves or by another one; which functions they make is another thing."""
    texts = [re.match(r"\s*#\s*define\s+(\w+)(.*)", text, re.DOTALL) for text in directives]
    macros = {match[1]: set(re.findall(r"\w+", match[2])) for match in texts if match}
    found = {"return"}
    while more := {name for name, words in macros.items() if words & found} - found:
        found |= more
    return found - {"return"}


def _has_lambda(body: Sequence[Token]) -> bool:
    solid = [token for token in body if token.kind != "space"]
    return any(
        token.text == "[" and before.text in ("=", "(", ",", "return", "{", ";") for before, token in pairwise(solid)
    )
