"""Loading: damaged files and external data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.import_model import import_model
from tvm_ext.relay_passes.onnx.load import load_onnx

Build = Callable[..., onnx.ModelProto]


@pytest.fixture
def matmul(build_model: Build) -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    return build_model([helper.make_node("MatMul", ["x", "w"], ["y"], "product")], constants={"w": weight})


def test_path_bytes_and_model_give_the_same(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(matmul, path)
    before = matmul.SerializeToString()
    for source in (matmul, matmul.SerializeToString(), path, str(path)):
        mod, params = import_model(source)
        assert [parameter.name for parameter in mod["main"].params] == ["x", "w"]
        assert list(params) == ["w"]
        assert params["w"].numpy().shape == (3, 4)
    assert matmul.SerializeToString() == before, "the caller's model was changed"


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_truncated_file(matmul: onnx.ModelProto, tmp_path: Path, kept: float) -> None:
    data = matmul.SerializeToString()
    path = tmp_path / "cut.onnx"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelError, match="remedy"):
        import_model(path)


@pytest.mark.parametrize("data", [b"", b"\x00" * 64, b"not an ONNX file at all", b"PK\x03\x04zip", bytes(range(256))])
def test_no_onnx(data: bytes) -> None:
    with pytest.raises(ModelError, match="no ONNX model"):
        import_model(data)


def test_every_flipped_byte_is_an_error_or_a_model(matmul: onnx.ModelProto) -> None:
    """Damage may go unnoticed (a weight's bit), but it never surfaces as anything but our own error."""
    data = bytearray(matmul.SerializeToString())
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 0x55
        try:
            import_model(bytes(damaged))
        except ModelError as error:
            assert error.problem  # noqa: PT017 - either outcome is right


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        import_model(tmp_path / "absent.onnx")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder"):
        import_model(tmp_path)


def test_wrong_kind_of_object() -> None:
    with pytest.raises(ModelError, match="not int"):
        load_onnx(3)  # type: ignore[arg-type]


def _save_external(model: onnx.ModelProto, folder: Path, location: str = "weights.bin") -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path


def _relocate(path: Path, location: str) -> None:
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())


def test_external_data_beside_the_model(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    expected = onnx.numpy_helper.to_array(matmul.graph.initializer[0])
    _, params = import_model(_save_external(matmul, tmp_path))
    np.testing.assert_array_equal(params["w"].numpy(), expected)


@pytest.mark.parametrize("location", ["../secret.bin", "sub/../../secret.bin", "{absolute}"])
def test_external_data_outside_the_folder(matmul: onnx.ModelProto, tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(48))
    path = _save_external(matmul, folder)
    _relocate(path, location.format(absolute=secret))
    with pytest.raises(ModelError, match=r"tensor 'w' .*refused"):
        import_model(path)


def test_external_data_through_a_link(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(48))
    path = _save_external(matmul, folder)
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").symlink_to(secret)
    with pytest.raises(ModelError, match="outside the model's folder"):
        import_model(path)


def test_external_data_missing_or_short(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    path = _save_external(matmul, tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(ModelError, match="tensor 'w'"):
        import_model(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match="does not exist"):
        import_model(path)


def test_external_data_without_a_folder(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    path = _save_external(matmul, tmp_path)
    with pytest.raises(ModelError, match="beside the model"):
        import_model(path.read_bytes())


def test_names_that_are_no_text(matmul: onnx.ModelProto) -> None:
    data = matmul.SerializeToString()
    with pytest.raises(ModelError, match="not UTF-8"):
        import_model(data.replace(b"product", b"pr\xffduct"))


def test_unknown_element_type(matmul: onnx.ModelProto) -> None:
    matmul.graph.input[0].type.tensor_type.elem_type = 65
    with pytest.raises(ModelError, match="'x' has the element type 65"):
        import_model(matmul)
