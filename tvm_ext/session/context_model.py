"""Models whose parts are compiled already: nodes ``EPContext`` of ONNX Runtime's, each with a library of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import onnx
from onnx import helper

from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.bind_inputs import declared_dims
from tvm_ext.relay_passes.onnx.load import load_onnx
from tvm_ext.runtime.library import Library
from tvm_ext.support.files import write_atomically

from .inference_session import PROVIDER
from .partition import Piece, importable_with_loops, partition, whole
from .pieces import Build


def write_context_model(
    model: str | Path | onnx.ModelProto,
    path: str | Path,
    *,
    shape: Mapping[str, Sequence[int]] | None = None,
    build: Build,
    embed: bool = False,
) -> list[Library]:
    """Write ``path``, an ONNX model in which each part that we compile is one node ``EPContext``.

    ONNX Runtime runs it with the library of `provider.library_path`, from any language; operators that the import
    refuses stay as they are. Libraries lie beside the model (``NAME.0.so``), or in it with ``embed``, up to 2 GB.

    ``shape``: sizes of inputs with open dimensions, by name. ``build`` compiles a model for the shapes of its inputs.
    Returns what was compiled, in the order in which it runs. Raises ModelError for a damaged model, one with nothing to
    compile, or tensors between parts whose sizes are not known.
    """
    path = Path(path)
    proto = _sized(load_onnx(model), shape or {})
    pieces = [whole(proto)] if importable_with_loops(proto) else partition(proto)
    compiled = {
        place: build(piece.model, _sizes(piece, proto)) for place, piece in enumerate(pieces) if not piece.refused
    }
    if not compiled:
        refused = ", ".join(operator for piece in pieces for operator in piece.refused)
        raise ModelError(f"nothing of the model can be compiled: {refused} are refused", "run it in ONNX Runtime")
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, onnx.TensorProto] = {}
    for place, piece in enumerate(pieces):
        if place in compiled:
            nodes.append(_context_node(piece, compiled[place], path, place, embed=embed))
        else:
            nodes += piece.model.graph.node
            constants.update((tensor.name, tensor) for tensor in piece.model.graph.initializer)
    names = {tensor.name for tensor in proto.graph.initializer}
    outputs = {value.name for value in proto.graph.output}
    graph = helper.make_graph(
        nodes,
        proto.graph.name or "main",
        [value for value in proto.graph.input if value.name not in names],
        proto.graph.output,
        list(constants.values()),
        value_info=[value for piece in pieces for value in piece.model.graph.output if value.name not in outputs],
    )
    opsets = {item.domain: item.version for piece in pieces for item in piece.model.opset_import} | {"com.microsoft": 1}
    context = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        ir_version=proto.ir_version,
        producer_name="tvm_ext",
    )
    write_atomically(path, context.SerializeToString())
    return list(compiled.values())


def _context_node(piece: Piece, library: Library, path: Path, number: int, *, embed: bool) -> onnx.NodeProto:
    file = path.with_name(f"{path.stem}.{number}.so")
    library.export_library(file)
    content: str | bytes = file.name
    if embed:
        content = file.read_bytes()
        file.unlink()
    return helper.make_node(
        "EPContext",
        list(piece.inputs),
        list(piece.outputs),
        name=f"tvm_ext_{number}",
        domain="com.microsoft",
        main_context=1,
        embed_mode=int(embed),
        ep_cache_context=content,
        ep_sdk_version=version("tvm_ext"),
        partition_name=f"tvm_ext_{number}",
        source=PROVIDER,
    )


def _sized(model: onnx.ModelProto, shape: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """``model`` with the sizes of ``shape``, and of all tensors that follow from them."""
    constants = {tensor.name for tensor in model.graph.initializer}
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    named: dict[str, int] = {}
    for value in sized.graph.input:
        if value.name in constants or value.name not in shape:
            continue
        declared = declared_dims(value)
        if declared is not None and len(declared) == len(shape[value.name]):
            named.update(
                {dim: int(n) for dim, n in zip(declared, shape[value.name], strict=True) if isinstance(dim, str)}
            )
        dims = value.type.tensor_type.shape
        del dims.dim[:]
        for size in shape[value.name]:
            dims.dim.add().dim_value = int(size)
    for value in (*sized.graph.input, *sized.graph.value_info, *sized.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in named:
                dim.dim_value = named[dim.dim_param]
    for value in sized.graph.input:
        dims_now = declared_dims(value) if value.name not in constants else []
        if dims_now is None or not all(isinstance(size, int) for size in dims_now):
            raise ModelError(
                f"input '{value.name}' has open dimensions ({dims_now}), and is compiled ahead",
                f"give its sizes: --shape {value.name}=..., or register_execution_provider(), which compiles by shape",
            )
    return onnx.shape_inference.infer_shapes(sized, data_prop=True)


def _sizes(piece: Piece, model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    known = {value.name: value for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    sizes: dict[str, tuple[int, ...]] = {}
    for name in piece.inputs:
        dims = declared_dims(known[name]) if name in known else None
        if dims is None or not all(isinstance(size, int) for size in dims):
            raise ModelError(
                f"the sizes of tensor '{name}', which goes from ONNX Runtime to a compiled part, are not known",
                "declare them in the model's value_info, or compile when the session is made "
                "(register_execution_provider)",
            )
        sizes[name] = tuple(int(size) for size in dims if isinstance(size, int))
    return sizes
