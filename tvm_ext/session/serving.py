"""The runtime class by which MLServer serves a model over the Open Inference Protocol (version 2).

`model-settings.json` names it as ``"implementation": "tvm_ext.session.serving.TvmExtModel"``; MLServer has the servers
(HTTP, gRPC), adaptive batching and metrics. Needs the extra ``serve``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.codecs.numpy import to_datatype
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse, MetadataTensor
from mlserver.utils import get_model_uri

from tvm_ext.errors import TvmExtError
from tvm_ext.support.arrays import Array

from .inference_session import InferenceSession, NodeArg
from .session_options import SessionOptions

FILES = ("model.so", "model.onnx")
"""What is looked for where ``parameters.uri`` is a folder, in this order."""


class TvmExtModel(MLModel):  # type: ignore[misc] # mlserver is not there when types are checked
    """An ONNX model, or a library of ``tvm-ext compile``, in an `InferenceSession`.

    ``parameters.uri`` is the file or its folder. Of ``parameters.extra``: ``threads``, cores that kernels are divided
    among (all), and ``batches``, sizes of the first dimension that are built before the server is ready ([1]). Requests
    run one after the other, each on all ``threads``; those that MLServer puts together run as one batch.
    """

    async def load(self) -> bool:
        path = await get_model_uri(self._settings, wellknown_filenames=list(FILES))
        extra = dict(self._settings.parameters.extra or {}) if self._settings.parameters else {}
        options = SessionOptions(intra_op_num_threads=int(extra.get("threads", 0)))
        self._runs = ThreadPoolExecutor(1, "tvm_ext-serve")
        self._session = await self._in_turn(InferenceSession, path, options)
        for size in extra.get("batches", [1]):
            await self._in_turn(self._prepare, int(size))
        self.inputs = [_metadata(item) for item in self._session.get_inputs()]
        self.outputs = [_metadata(item) for item in self._session.get_outputs()]
        return True

    async def unload(self) -> bool:
        self._runs.shutdown(wait=True)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """The outputs that are asked for, by default all; raises InferenceError for inputs that do not fit."""
        names = [item.name for item in payload.outputs or ()] or [item.name for item in self._session.get_outputs()]
        given = {item.name: NumpyCodec.decode_input(item) for item in payload.inputs}
        try:
            values: Sequence[Array] = await self._in_turn(self._session.run, names, given)
        except TvmExtError as error:
            raise InferenceError(f"{self.name}: {error}") from error
        outputs = [NumpyCodec.encode_output(name, value) for name, value in zip(names, values, strict=True)]
        return InferenceResponse(id=payload.id, model_name=self.name, model_version=self.version, outputs=outputs)

    async def _in_turn(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._runs, function, *arguments)

    def _prepare(self, size: int) -> None:
        """Build for batches of ``size``, where all other dimensions are known."""
        zeros = {}
        for item in self._session.get_inputs():
            shape = [
                size if place == 0 and not isinstance(extent, int) else extent
                for place, extent in enumerate(item.shape or ())
            ]
            if item.shape is None or not all(isinstance(extent, int) for extent in shape):
                return  # requests say which shapes there are
            zeros[item.name] = np.zeros(shape, item.dtype)
        self._session.run(None, zeros)


def _metadata(item: NodeArg) -> MetadataTensor:
    """An input or output as the protocol describes it: open dimensions are -1."""
    shape = [extent if isinstance(extent, int) else -1 for extent in item.shape or ()]
    return MetadataTensor(name=item.name, datatype=to_datatype(item.dtype), shape=shape)
