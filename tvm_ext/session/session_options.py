"""`SessionOptions`: those of ONNX Runtime's options that have a meaning here."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from tvm_ext.options import BuildOptions

from .pieces import DENORMAL_AS_ZERO


@dataclass(slots=True)
class SessionOptions:
    """Those of ONNX Runtime's options that have a meaning here; its own `SessionOptions` serve as well.

    ``intra_op_num_threads``: cores that kernels are divided among; 0 for all that the process may use.
    ``build``: every other option of a build.
    """

    intra_op_num_threads: int = 0
    build: BuildOptions | None = None
    free_dimension_overrides: dict[str, int] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Set ``session.set_denormal_as_zero`` ("1": subnormal numbers are 0); other keys mean nothing here."""
        self.config[key] = value

    def get_session_config_entry(self, key: str) -> str:
        """The value of ``key``, "" for one that is not set."""
        return self.config.get(key, "")

    def add_free_dimension_override_by_name(self, dim_name: str, dim_value: int) -> None:
        """Give the open dimension ``dim_name`` a value, so that the model is compiled when the session is made."""
        self.free_dimension_overrides[dim_name] = dim_value


def flushes(options: Any) -> bool:
    """Whether `DENORMAL_AS_ZERO` is set in ONNX Runtime's options, which raise for a key that is not, or in ours."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return bool(options.get_session_config_entry(DENORMAL_AS_ZERO) == "1")
    return False
