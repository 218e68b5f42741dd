"""CUDA C++ as tokens, and the functions of a file: as much of the language as moving kernels needs.

No preprocessor runs: directives are tokens, and what they switch off is read like the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm_ext.errors import InputError

_TOKEN = re.compile(
    r"""
    (?P<directive>(?<![^\n])[ \t]*\#(?:\\\n|[^\n])*)
  | (?P<space>[^\S\n]+|\n|//[^\n]*|/\*.*?\*/)
  | (?P<text>R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
  | (?P<mark_>::|->|<<<|>>>|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_OPENING, _CLOSING = {"(": ")", "[": "]", "{": "}"}, set(")]}")
_ATTRIBUTES = ("__launch_bounds__", "__attribute__", "__align__", "alignas", "__maxnreg__", "__cluster_dims__")


@dataclass(frozen=True, slots=True)
class Token:
    """``kind``: "space" (comments too), "directive", "text", "word", "number" or "mark"."""

    kind: str
    text: str


def tokens_of(source: str) -> list[Token]:
    """All of ``source``; joined, the tokens' texts are ``source`` again, without comments."""
    found = []
    for match in _TOKEN.finditer(source if source.endswith("\n") else source + "\n"):
        kind = (match.lastgroup or "").rstrip("_")
        kind = "text" if match["text"] else kind
        text = match[0]
        if kind == "space" and text.startswith("/"):
            text = "\n" * text.count("\n") or " "
        found.append(Token(kind, text))
    return found


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def closing(tokens: Sequence[Token], start: int) -> int:
    """The place of the bracket that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(tokens)):
        token = tokens[place]
        if token.kind != "mark":
            continue
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if depth == 0:
            return place
    raise InputError(f"a bracket {tokens[start].text!r} of the CUDA source is never closed", "give the whole source")


def next_place(tokens: Sequence[Token], start: int) -> int:
    """The place of the first token from ``start`` on that is no space; the end where there is none."""
    return next((place for place in range(start, len(tokens)) if tokens[place].kind != "space"), len(tokens))


def previous(tokens: Sequence[Token], start: int) -> Token | None:
    """The token before ``start`` that is no space."""
    return next((tokens[place] for place in range(start - 1, -1, -1) if tokens[place].kind != "space"), None)


def split_at(tokens: Sequence[Token], separator: str) -> list[list[Token]]:
    """The parts between separators outside of brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "mark":
            depth += (token.text in _OPENING or token.text == "<") - (token.text in _CLOSING or token.text == ">")
            if token.text == separator and depth == 0:
                parts.append([])
                continue
        parts[-1].append(token)
    return parts


@dataclass(frozen=True, slots=True)
class CudaFunction:
    """A function with a body: places of its first token, its parameters' brackets and its body's braces."""

    name: str
    words: frozenset[str]  # before its parameters: __global__, template, static ...
    begin: int
    parameters: tuple[int, int]
    body: tuple[int, int]


def functions_of(tokens: Sequence[Token]) -> Iterator[CudaFunction]:
    """The functions of a file, those in namespaces and ``extern "C"`` blocks too, members of classes not."""
    begin = place = next_place(tokens, 0)
    while place < len(tokens):
        token = tokens[place]
        if token.kind == "directive" or (token.kind == "mark" and token.text in ";}"):
            begin = place = next_place(tokens, place + 1)
        elif token.kind == "mark" and token.text == "{":
            head = tokens[begin:place]
            function = _function(tokens, begin, place)
            if function is not None:
                yield function
            if function is None and (_is_namespace(head)):
                begin = place = next_place(tokens, place + 1)
            else:
                place = closing(tokens, place) + 1
                begin = place = next_place(tokens, place)
        elif token.kind == "mark" and token.text in "([":
            place = closing(tokens, place) + 1
        else:
            place += 1


def _is_namespace(head: Sequence[Token]) -> bool:
    words = [token.text for token in head if token.kind != "space"]
    return bool(words) and ("namespace" in words or (words[0] == "extern" and len(words) == 2))


def _function(tokens: Sequence[Token], begin: int, brace: int) -> CudaFunction | None:
    """The function whose body opens at ``brace``, if that is what opens there."""
    words: set[str] = set()
    place, name = begin, -1
    while place < brace:
        token = tokens[place]
        if token.kind == "word":
            words.add(token.text)
            name = place
        elif token.kind == "mark" and token.text == "(" and name >= 0:
            end = closing(tokens, place)
            if tokens[name].text not in _ATTRIBUTES and (
                "template" in words or not any(t.text == "=" for t in tokens[begin:place])
            ):
                kind = frozenset(words - {tokens[name].text})
                return CudaFunction(tokens[name].text, kind, begin, (place, end), (brace, closing(tokens, brace)))
            place, name = end, -1
        elif token.kind == "mark" and token.text in "([":
            place = closing(tokens, place)
        place += 1
    return None
