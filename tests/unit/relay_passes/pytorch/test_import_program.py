"""`relay.frontend.from_torch`: operators and networks against torch, state without copies, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from tests.support import torch_operators
from tests.support.exported_models.programs import run_program
from tests.support.quick_target import UNOPTIMISED
from tvm_ext import relay
from tvm_ext.errors import InputError, ModelError, UnsupportedEnvironmentError

torch = pytest.importorskip("torch", reason="programs of torch.export need torch (extra models)")


def module_of(call: Callable[..., Any], *parts: Any) -> Any:
    class Called(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(parts)

        def forward(self, *values: Any) -> Any:
            return call(*self.parts, *values)

    return Called().eval()


def exported(module: Any, *values: Any, **options: Any) -> Any:
    return torch.export.export(module, values, **options)


@pytest.mark.parametrize("group", torch_operators.GROUPS)
def test_operators_agree_with_torch(group: str) -> None:
    texts = torch_operators.GROUPS[group].split()[3::20]
    assert torch_operators.problem_of(texts, torch_operators.inputs()) == ""


def _networks() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    torch.manual_seed(3)
    nn, attend = torch.nn, torch.nn.functional.scaled_dot_product_attention
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    layer = nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)
    return {
        "convolution": (module_of(lambda c, n, x: n(c(x)), nn.Conv2d(3, 4, 3), norm), (torch.randn(1, 3, 6, 6),)),
        "lstm": (module_of(lambda own, x: own(x), layer), (torch.randn(2, 4, 3),)),
        "gru": (module_of(lambda own, x, h: own(x, h), nn.GRU(3, 5)), (torch.randn(4, 2, 3), torch.randn(1, 2, 5))),
        "attention": (
            module_of(lambda p, x, m: attend(p(x), x, x, m), nn.Linear(8, 8)),
            (torch.randn(2, 1, 6, 8), torch.arange(6)[None] < torch.tensor([3, 0, 6, 6, 1, 2])[:, None]),
        ),
    }  # fmt: skip


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["convolution", "lstm", "gru", "attention"])
def test_networks_agree_with_torch(name: str) -> None:
    module, values = _networks()[name]
    mod, params = relay.frontend.from_torch(exported(module, *values))
    got = run_program(relay.build(mod, UNOPTIMISED, params=params), mod, values)
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(module(*values))
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-5)


def test_state_is_torchs_own_memory() -> None:
    layer = torch.nn.Linear(64, 64).to(torch.bfloat16)
    mod, params = relay.frontend.from_torch(exported(layer, torch.zeros(1, 64, dtype=torch.bfloat16)))
    held = params["p_weight"]
    assert str(held.dtype) == "bfloat16"
    assert torch.from_dlpack(held).data_ptr() == layer.weight.data_ptr()
    assert [parameter.name for parameter in mod["main"].params][1:] == list(params)


def test_shape_binds_an_open_batch() -> None:
    module, (x,) = _networks()["convolution"]
    program = exported(module, x.repeat(2, 1, 1, 1), dynamic_shapes=(({0: torch.export.Dim("batch", min=2)},),))
    mod, _ = relay.frontend.from_torch(program, shape={"values_0": (5, 3, 6, 6)})
    assert [int(extent) for extent in mod["main"].params[0].ty.shape] == [5, 3, 6, 6]
    with pytest.raises(InputError, match=r"dimension .* of input 'values_0' has no value"):
        relay.frontend.from_torch(program)
    with pytest.raises(InputError, match="dimension 1 of input 'values_0' is 3, not 4"):
        relay.frontend.from_torch(program, shape={"values_0": (5, 4, 6, 6)})


def test_an_unknown_operator_is_named_with_its_node() -> None:
    program = exported(module_of(lambda x: torch.special.bessel_j0(x)), torch.ones(2))
    with pytest.raises(ModelError, match=r"special_bessel_j0.default \(node special_bessel_j0"):
        relay.frontend.from_torch(program)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: x[x > 0], "known only at run time|have no conversion"),
        (lambda x: x + torch.rand(2), "have no conversion: rand"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, training=True), "have no conversion|drops elements"),
        (lambda x: torch.nn.functional.max_pool2d(x[None, None], 1, return_indices=True)[1], "asks for result 1"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused(call: Callable[..., Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        relay.frontend.from_torch(exported(module_of(call), torch.ones(2)))


def test_only_programs_are_imported() -> None:
    with pytest.raises(InputError, match=r"is no torch\.export\.ExportedProgram"):
        relay.frontend.from_torch(torch.nn.Linear(2, 2))


def scripted(folder: Path, name: str, module: Any) -> Path:
    torch.jit.save(torch.jit.script(module.eval()), folder / name)
    return folder / name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_file_is_imported_with_shapes_and_dtypes(tmp_path: Path) -> None:
    """Its inputs keep their names, which torch's converter changes."""
    module = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    path = scripted(tmp_path, "words.pt", module)
    mod, params = relay.frontend.from_torch(path, {"input": (2, 3)}, {"input": "int64"})
    lib = relay.build(mod, "llvm", params=params)
    assert lib.report.model == "words"
    run = relay.GraphModule(lib["default"](tvm.cpu()))
    ids = torch.arange(6).reshape(2, 3)
    run.run(input=ids.numpy())
    wanted = module(ids).detach().numpy()
    assert np.linalg.norm(run.get_output(0).numpy() - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_that_is_not_understood_says_what_to_do(tmp_path: Path) -> None:
    path = scripted(tmp_path, "layer.pt", torch.nn.Linear(3, 4))
    for shape, dtype, message in (
        ({}, {}, r"shape of input 'input'(.|\n)*--shape input="),
        ({"x": (1, 3)}, {}, r"no input 'x'(.|\n)*are input"),
        ({"input": (1, 3)}, {"input": "floot"}, "no dtype 'floot'"),
        ({"input": (1, 5)}, {}, r"makes no program(.|\n)*torch\.export\.save"),
    ):
        with pytest.raises((InputError, ModelError), match=message):
            relay.frontend.from_torch(path, shape, dtype)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(ModelError, match="no program"):
        relay.frontend.from_torch(tmp_path / "weights.pt")


def test_a_program_is_read_from_its_file(tmp_path: Path) -> None:
    torch.export.save(exported(torch.nn.Linear(3, 4), torch.zeros(1, 3)), tmp_path / "layer.pt2")
    mod, params = relay.frontend.from_torch(tmp_path / "layer.pt2")
    assert next(list(param.ty.shape) for param in mod["main"].params) == [1, 3] and len(params) == 2


def test_without_torch_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedEnvironmentError, match=r"needs torch(.|\n)*tvm-ext\[models\]"):
        relay.frontend.from_torch(object())
    with pytest.raises(UnsupportedEnvironmentError, match="files of PyTorch needs torch"):
        relay.frontend.from_torch("model.pt")
