"""How much of everything an imported model may have: what keeps a hostile or damaged file from taking the machine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tvm_ext.errors import ModelError, OptionError
from tvm_ext.options import IMPORT_LIMITS_VARIABLE, import_limits_text

_MOST = 2**62  # a choice: twice it still fits a signed integer of 64 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportLimits:
    """Limits of one import; what passes one is a ModelError that names the node, the limit and how to raise it.

    * ``tensor_elements``: elements of any tensor of the model, and any extent.
    * ``constant_elements``: elements of a constant that the import makes itself: filled tensors, tables of indices,
      windows.
    * ``folded_bytes``: bytes of all that the import computes in advance, besides eight times the model's own constants;
      what is more is computed at run time.
    * ``nodes``: nodes, those of branches and of expanded functions included.
    * ``values``: inputs, outputs and initializers of a graph, of each kind; also functions of the model.
    * ``operands``: inputs of one node, its attributes, and the values in one of them.
    * ``results``: outputs of one node.
    * ``text_bytes``: bytes of one name or string.
    * ``rank``: dimensions of a tensor.
    * ``depth``: graphs inside graphs, and calls of functions inside functions.

    Raises OptionError for a limit that is no whole number from 1 to 2**62.
    """

    tensor_elements: int = 2**31
    constant_elements: int = 2**26
    folded_bytes: int = 2**31
    nodes: int = 10_000
    values: int = 20_000
    operands: int = 4096
    results: int = 512
    text_bytes: int = 2**16
    rank: int = 32
    depth: int = 16

    def __post_init__(self) -> None:
        for name in self.names():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                raise OptionError(f"import limit '{name}' is {value!r}.", "give a whole number from 1 to 2**62")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def current(cls) -> ImportLimits:
        """The defaults, overridden by ``TVM_EXT_IMPORT_LIMITS``, e.g. ``tensor_elements=8589934592,nodes=100000``.

        Raises OptionError for what is no limit or no number.
        """
        return replace(cls(), **dict(cls._named_number(part) for part in import_limits_text().split(",") if part))

    @classmethod
    def _named_number(cls, text: str) -> tuple[str, int]:
        name, _, number = (part.strip() for part in text.partition("="))
        if name not in cls.names() or not number.isascii() or not number.isdigit():
            raise OptionError(
                f"{IMPORT_LIMITS_VARIABLE} holds '{text}', which is no limit.",
                f"write name=number, with commas between; the names are {', '.join(cls.names())}",
            )
        return name, int(number[:20])


def beyond(what: str, name: str, number: int, limits: ImportLimits) -> ModelError:
    """The error of ``what``, which passes the limit ``name``, with the way to raise that to ``number``."""
    return ModelError(f"{what} (limit {getattr(limits, name)})", raise_limit(name, number))


def raise_limit(name: str, number: int) -> str:
    """The remedy of an error: how to let a model have ``number`` of something."""
    return (
        "check that this is meant; if it is, raise the limit: "
        f"from_onnx(..., limits=ImportLimits({name}={number})), or {IMPORT_LIMITS_VARIABLE}={name}={number}"
    )
