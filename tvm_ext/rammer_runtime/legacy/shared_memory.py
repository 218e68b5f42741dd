"""Shared variables of a kernel become places in a pool, which rTasks of all kernels use in turn."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm_ext.errors import InputError
from tvm_ext.support.arithmetic import ceil_div

from .tokens import Token, closing, next_place, split_at, text_of

ALIGNMENT = 16
"""Bytes: that of the widest vector access, which every variable has."""

POOL_ALIGNMENT = 128
"""Bytes: that of a pool, and the most that a variable may ask for."""

_WORDS_OF_PLACE = ("__align__", "alignas")


@dataclass(slots=True)
class Pool:
    """The declarations seen so far: where the next variable may begin, in C++ and as a number if that is known.

    ``constants`` are the integers that the source names.
    """

    kernel: str
    end: str
    size_bytes: int | None
    constants: Mapping[str, int]
    count: int = 0


def rewrite_declarations(tokens: Sequence[Token], pool: Pool) -> list[Token]:
    """A kernel's body (between its braces) with references into ``tvm_ext_pool`` for ``__shared__`` variables.

    Raises InputError for a declaration inside an inner block, whose place the outer ones could not count on.
    """
    result: list[Token] = []
    place = depth = 0
    while place < len(tokens):
        token = tokens[place]
        depth += (token.text == "{") - (token.text == "}") if token.kind == "mark" else 0
        starts = token.text == "__shared__" or (token.text == "extern" and _is_shared(tokens, place))
        if not starts:
            result.append(token)
            place += 1
            continue
        end = next(p for p in range(place, len(tokens)) if tokens[p].text == ";")
        declaration = list(tokens[place:end])
        if depth:
            raise InputError(
                f"kernel {pool.kernel}: shared memory is declared in an inner block: {text_of(declaration).strip()}",
                "declare it at the beginning of the kernel",
            )
        result.append(Token("text", _declared(declaration, pool)))
        place = end + 1
    return result


def _is_shared(tokens: Sequence[Token], place: int) -> bool:
    following = next_place(tokens, place + 1)
    return following < len(tokens) and tokens[following].text == "__shared__"


def _declared(declaration: Sequence[Token], pool: Pool) -> str:
    plain = [token for token in declaration if token.text not in ("__shared__", "extern", "static")]
    words, alignment = _without_alignment(plain)
    if any(token.text == "=" for token in words):
        raise InputError(f"kernel {pool.kernel}: a shared variable with a value: {text_of(declaration).strip()}")
    first, *others = split_at(words, ",")
    name = _name_place(first, pool)
    kind = text_of(first[:name]).strip()
    parts = [first[name:], *others]
    if any(token.text == "extern" for token in declaration):
        return "".join(f"{kind}* {text_of(part[:1])} = ({kind}*)tvm_ext_pool;" for part in map(_stripped, parts))
    return " ".join(_variable(kind, _stripped(part), pool, alignment) for part in parts)


def _variable(kind: str, declarator: Sequence[Token], pool: Pool, alignment: int) -> str:
    name, shape = declarator[0].text, text_of(declarator[1:]).strip()
    if declarator[0].kind != "word":
        raise InputError(f"kernel {pool.kernel}: a shared variable of a form that is not known: {text_of(declarator)}")
    pool.count += 1
    size = _size_bytes(kind, shape, pool.constants)
    known = pool.size_bytes is not None and size is not None
    pool.size_bytes = ceil_div(pool.size_bytes or 0, alignment) * alignment + (size or 0) if known else None
    type_name, begin, end = (f"tvm_ext_{what}_{pool.count}" for what in ("type", "begin", "end"))
    text = (
        f"typedef {kind} {type_name}{shape}; "
        f"constexpr unsigned {begin} = ({pool.end} + {alignment - 1}) / {alignment} * {alignment}, "
        f"{end} = {begin} + (unsigned)sizeof({type_name}); "
        f'static_assert({end} <= tvm_ext_pool_bytes, "shared memory of {pool.kernel}: more than was said"); '
        f"{type_name}& {name} = *({type_name}*)((char*)tvm_ext_pool + {begin});"
    )
    pool.end = end
    return text


def _without_alignment(tokens: Sequence[Token]) -> tuple[list[Token], int]:
    """``tokens`` without what they say of alignment, and the bytes of that; more than `POOL_ALIGNMENT` is refused."""
    result: list[Token] = []
    place, alignment = 0, ALIGNMENT
    while place < len(tokens):
        if tokens[place].text in _WORDS_OF_PLACE:
            opening = next_place(tokens, place + 1)
            end = closing(tokens, opening)
            said = text_of(tokens[opening + 1 : end]).strip()
            if not said.isdigit() or int(said) > POOL_ALIGNMENT:
                raise InputError(f"a shared variable aligned to {said} bytes", f"{POOL_ALIGNMENT} bytes at most")
            place, alignment = end, max(alignment, int(said))
        else:
            result.append(tokens[place])
        place += 1
    return result, alignment


def _name_place(declarator: Sequence[Token], pool: Pool) -> int:
    """Where the variable's name is: the last word before its brackets or end."""
    last = -1
    for position, token in enumerate(declarator):
        if token.text == "[":
            break
        if token.kind == "word":
            last = position
    if last <= 0:
        raise InputError(f"kernel {pool.kernel}: a shared variable without a type: {text_of(declarator).strip()}")
    return last


_SIZES = {
    "char": 1, "bool": 1, "half": 2, "__half": 2, "__nv_bfloat16": 2, "short": 2, "int": 4, "unsigned": 4, "float": 4,
    "long long": 8, "double": 8, "float2": 8, "float4": 16, "int2": 8, "int4": 16, "half2": 4, "__half2": 4,
    "int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8,
}  # fmt: skip


def _size_bytes(kind: str, shape: str, constants: Mapping[str, int]) -> int | None:
    """Bytes of an array of these; None where its type or shape says nothing that is known here."""
    words = kind.split()
    plain = " ".join(word for word in words if word not in ("volatile", "const", "signed", "unsigned"))
    size = _SIZES.get(plain or ("unsigned" if "unsigned" in words else ""))
    for extent in re.findall(r"\[([^\]]*)\]", shape):
        value = integer_of(extent, constants)
        size = None if size is None or value is None else size * value
    return size


def integer_of(expression: str, constants: Mapping[str, int]) -> int | None:
    """The value of sums and products of numbers and named constants; None for anything else."""
    named = re.sub(r"[A-Za-z_]\w*", lambda match: str(constants.get(match[0], "?")), expression)
    if not re.fullmatch(r"[\d\s+*()-]{1,200}", named):
        return None
    try:
        tree = ast.parse(named.strip(), mode="eval").body
    except SyntaxError:
        return None
    return _evaluated(tree)


def _evaluated(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _evaluated(node.left), _evaluated(node.right)
    if left is None or right is None:
        return None
    return {"Add": left + right, "Sub": left - right, "Mult": left * right}.get(type(node.op).__name__)


_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]+)$", re.MULTILINE)
_CONSTANT = re.compile(r"\bconst(?:expr)?\s+(?:unsigned\s+)?(?:int|size_t|unsigned)\s+(\w+)\s*=([^;,]+);")


def constants_of(source: str) -> dict[str, int]:
    """The integers that ``source`` names by ``#define`` or as constants."""
    found: dict[str, int] = {}
    for name, value in (*_DEFINED.findall(source), *_CONSTANT.findall(source)):
        found.update(_named(name, value, found))
    return found


def _named(name: str, value: str, known: Mapping[str, int]) -> dict[str, int]:
    number = integer_of(value, known)
    return {} if number is None else {name: number}


def _stripped(tokens: Sequence[Token]) -> list[Token]:
    return [token for token in tokens if token.kind != "space"]
