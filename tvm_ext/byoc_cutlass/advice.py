"""System-friendly models (Bolt §3.3): which channels, activations and added 1x1 convolutions a model would gain by.

From what partitioning and padding decided about its graph, with the models of time that they decided by. Nothing is
measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from tvm_ext._tvm import Var
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import described, dtype_of, is_tensor, static_shape
from tvm_ext.cost.alignment_model import (
    TILE_ROWS,
    WIDEST_TILE_COLUMNS,
    AlignedProduct,
    BlockTile,
    copied_us,
    has_matrix_units,
    product_us,
)
from tvm_ext.cost.epilogue_traffic import US_PER_S, instructions_of, instructions_us
from tvm_ext.cost.gpu_chain import ProductChain
from tvm_ext.cost.gpu_chain_tiles import construct_chain
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError, TargetError
from tvm_ext.records.advice import ActivationAdvice, AlignmentAdvice, CombinedAdvice, DeepeningAdvice, ModelAdvice
from tvm_ext.records.padding import PaddingRecord, ProductPadding
from tvm_ext.records.partition import CutlassProblem

from .activations import is_spelling
from .back_to_back import product_chain
from .convolutions import ConvolutionFamily
from .epilogue import Epilogue
from .gemm import GemmConfig
from .graph_values import GraphValues
from .patterns import OF_MODEL, Region, regions_of
from .products import ProductFamily

DEAR = ("gelu", "gelu_tanh", "silu", "softplus", "mish")
"""Activations that others can stand in for; sigmoid and tanh are mostly gates, whose range counts."""

ALTERNATIVES = ("hardswish", "relu")

BENDING = frozenset(
    {
        *("exp", "log", "tanh", "erf", "sigmoid", "maximum", "minimum", "clip", "where", "abs", "sqrt", "power"),
        *("nn.relu", "nn.prelu", "nn.leakyrelu", "nn.silu", "nn.gelu", "nn.gelu_tanh"),
        *("greater", "less", "greater_equal", "less_equal"),
    }
)
"""Operators by which a function of one value is more than a scale and a shift."""

FREE_SHARE = 0.25
"""A 1x1 convolution is almost free where it adds no more than this share of the 3x3 convolution's time.
Bolt's networks lose 15.3 % of their speed on average by such convolutions (§4.3, Table 5)."""


def advise(values: Sequence[GraphValues], padding: PaddingRecord, device: DeviceSpec) -> ModelAdvice:
    """Advice on a module, padded and in NHWC: its functions' values, and what padding decided."""
    return Advisor(device).advise(values, padding)


class Advisor:
    """Advice for one ``device``; products repeat, and each kind is predicted once."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self._alone_us: dict[CutlassProblem, float] = {}
        self._template_us: dict[CutlassProblem, float] = {}

    def advise(self, values: Sequence[GraphValues], padding: PaddingRecord) -> ModelAdvice:
        """Advice on a module, padded and in NHWC: its functions' values, and what padding decided."""
        functions = [(function, regions_of(function, self.device)) for function in values]
        regions = [(function, region) for function, listed in functions for region in listed.taken]
        deepening, apart = self.deepening_advice([region for _, region in regions])
        problems = [region.record.problem for _, region in regions]
        on_units = [problem for problem in problems if self._on_matrix_units(problem)]
        saved = [
            self._chain_saving_us(values_of, region, listed.taken)
            for values_of, listed in functions
            for region in listed.taken
        ]
        saved = [saved_us for saved_us in saved if saved_us > 0]
        alignment, activations = alignment_advice(padding.products), self.activation_advice(regions)
        products_us = sum(self.product_us(problem) for problem in on_units)
        epilogues_us = sum(self._epilogue_us(region) for _, region in regions)
        now_us = products_us + epilogues_us - sum(saved)
        now_us += sum(entry.now_us for entry in activations if not entry.fused)
        now_us += sum(entry.gain_us for entry in alignment if entry.handled != UNPADDED)
        changes = {
            "channels in multiples of 16 bytes": -sum(entry.gain_us for entry in alignment),
            "Hardswish for all activations": self._smooth_us(activations, [region for _, region in regions]),
            "a 1x1 convolution behind 3x3 ones where almost free": sum(e.fused_us - e.alone_us for e in deepening),
        }
        return ModelAdvice(
            device=self.device.name,
            products=len(problems),
            products_us=products_us,
            epilogues_us=epilogues_us,
            chains=len(saved),
            chains_saved_us=sum(saved),
            alignment=alignment,
            activations=activations,
            deepening=deepening,
            not_deepened=apart,
            combinations=_combined(now_us, changes),
            refused=tuple(refusal for _, listed in functions for refusal in listed.refused),
        )

    def _on_matrix_units(self, problem: CutlassProblem) -> bool:
        return not problem.simt and has_matrix_units(self.device, problem.dtypes[0])

    def activation_advice(self, regions: Iterable[tuple[GraphValues, Region]]) -> tuple[ActivationAdvice, ...]:
        """One entry for each function in epilogues that another could stand in for, and for each that is in none."""
        fused: dict[str, list[float]] = {}
        apart: dict[tuple[str, str], list[Var]] = {}
        for values, region in regions:
            elements = prod(static_shape(region.members[-1]) or ())
            for step in region.record.epilogue:
                if step.function in DEAR:
                    fused.setdefault(step.function, []).append(elements)
            if region.record.ended.startswith(OF_MODEL):
                continue  # the kernel that reads the result computes it
            if (bent := function_behind(values, region.result)) is not None:
                names = " ".join(dict.fromkeys(bent[1]))
                apart.setdefault((names, _general(region)), []).append(region.result)
        entries = [self._fused_advice(name, elements) for name, elements in fused.items()]
        entries += [self._apart_advice(names, reason, results) for (names, reason), results in apart.items()]
        return tuple(sorted(entries, key=lambda entry: entry.alternatives[-1][1] - entry.now_us))

    def _function_us(self, name: str, elements: float) -> float:
        """Of an epilogue's step on so many elements."""
        return instructions_us(elements * instructions_of(name, self.device), self.device)

    def _instead(self, elements: float, function: str) -> tuple[tuple[str, float], ...]:
        others = [name for name in ALTERNATIVES if name != function]
        return tuple((name, self._function_us(name, elements)) for name in others)

    def _fused_advice(self, function: str, elements: Sequence[float]) -> ActivationAdvice:
        return ActivationAdvice(
            function=function,
            calls=len(elements),
            fused=True,
            now_us=self._function_us(function, sum(elements)),
            alternatives=self._instead(sum(elements), function),
        )

    def _apart_advice(self, names: str, reason: str, results: Sequence[Var]) -> ActivationAdvice:
        sizes = [prod(static_shape(result) or ()) for result in results]
        moved = [size * itemsize_bytes(dtype_of(result)) for size, result in zip(sizes, results, strict=True)]
        return ActivationAdvice(
            function=f"a function of {names}",
            calls=len(results),
            fused=False,
            now_us=sum(copied_us(count, count, self.device) for count in moved),
            alternatives=self._instead(sum(sizes), ""),
            reason=reason,
        )

    def _smooth_us(self, activations: Iterable[ActivationAdvice], regions: Iterable[Region]) -> float:
        """What Hardswish costs beyond the activations of ``activations`` and every ReLU in an epilogue; may save."""
        relus = sum(
            prod(static_shape(region.members[-1]) or ())
            for region in regions
            for step in region.record.epilogue
            if step.function == "relu"
        )
        more_us = self._function_us("hardswish", relus) - self._function_us("relu", relus)
        return more_us + sum(dict(entry.alternatives)["hardswish"] - entry.now_us for entry in activations)

    def deepening_advice(self, regions: Iterable[Region]) -> tuple[tuple[DeepeningAdvice, ...], tuple[str, ...]]:
        """3x3 convolutions behind which a 1x1 convolution of as many filters is almost free; why others are none."""
        alike: dict[CutlassProblem, list[Region]] = {}
        for region in regions:
            problem = region.record.problem
            if problem.window and problem.anchor == "conv2d" and problem.window.filter_extents == (3, 3):
                alike.setdefault(problem, []).append(region)
        entries, apart = list[DeepeningAdvice](), list[str]()
        for problem, calls in alike.items():
            entry = self._deepening(problem, len(calls), _described(calls[0]))
            if isinstance(entry, str):
                apart.append(entry)
            else:
                entries.append(entry)
        return tuple(sorted(entries, key=lambda entry: entry.added_share)), tuple(apart)

    def _deepening(self, problem: CutlassProblem, calls: int, text: str) -> DeepeningAdvice | str:
        behind = replace(problem, depth=problem.columns, window=None)
        tiles = construct_chain(_chain(problem, behind), self.device, "matrix units")
        if not tiles.ranked:
            return f"{text}: {tiles.refusal}"
        tile, time = tiles.ranked[0]
        fused = time.time_s * US_PER_S
        alone, added = (self._one_us(product) for product in (problem, behind))
        if fused > (1 + FREE_SHARE) * alone:
            return f"{text}: it would add {(fused - alone) / alone:.0%} of the convolution's predicted time"
        return DeepeningAdvice(
            described=text,
            calls=calls,
            alone_us=alone * calls,
            fused_us=fused * calls,
            apart_us=(alone + added) * calls,
            residence=tile.residence,
        )

    def _chain_saving_us(self, values: GraphValues, region: Region, others: Sequence[Region]) -> float:
        """What a convolution and the 1x1 convolution that alone reads it save in one kernel; 0 where there is none."""
        users = values.users_of(region.result)
        behind = next((other.record.problem for other in others if [other.members[0]] == users), None)
        problem = region.record.problem
        if behind is None or behind.window is None or (problem.anchor, behind.anchor) != ("conv2d", "conv2d"):
            return 0.0
        if not behind.window.is_pointwise:
            return 0.0
        chains = (_chain(problem, behind), _chain(problem), _chain(behind))
        tiles = [construct_chain(chain, self.device, "matrix units").ranked for chain in chains]
        if not all(tiles):
            return 0.0
        # The share that their own model says, of the time that the products take here; never the first's own.
        fused, *apart = (ranked[0][1].time_s for ranked in tiles)
        first_us, second_us = (self.product_us(product) for product in (problem, behind))
        return min(second_us, max(0.0, 1 - fused / sum(apart)) * (first_us + second_us))

    def _epilogue_us(self, region: Region) -> float:
        elements = prod(static_shape(region.members[0]) or ())
        steps = [step.function for step in region.record.epilogue if step.function != "cast"]
        return sum(self._function_us(step, elements) for step in steps)

    def _one_us(self, problem: CutlassProblem) -> float:
        """A product in a kernel of its own, whose blocks need not have all columns: the better of both models."""
        if problem not in self._alone_us:
            tiles = construct_chain(_chain(problem), self.device, "matrix units").ranked
            times = [self.product_us(problem), *(time.time_s * US_PER_S for _, time in tiles[:1])]
            self._alone_us[problem] = min(times)
        return self._alone_us[problem]

    def product_us(self, problem: CutlassProblem) -> float:
        """With tiles of 128 x 128, by which the model's rates were found, or the smaller ones of the best template.

        Worked example, 256 x 512 x 2048 on an A100: 8 large tiles leave 100 units idle, 8 slices of them do not.
        """
        if problem not in self._template_us:
            product, tiles = aligned_product(problem), [None, *self._smaller_tiles(problem)]
            self._template_us[problem] = min(product_us(product, self.device, tile) for tile in tiles)
        return self._template_us[problem]

    def _smaller_tiles(self, problem: CutlassProblem) -> list[BlockTile]:
        """Of the template that is predicted to be the fastest, where it divides the product more finely."""
        plain = Epilogue(out_dtype=problem.dtypes[2])
        tiles: list[GemmConfig] = []
        try:
            if problem.window is None:
                tiles = [ranked.config for ranked in ProductFamily(problem, self.device, plain).propose(1)]
            elif problem.anchor != "conv2d_depthwise":
                tiles = [ranked.config.tile for ranked in ConvolutionFamily(problem, self.device, plain).propose(1)]
        except (InputError, TargetError):
            return []
        blocks = [BlockTile(rows=c.threadblock[0], columns=c.threadblock[1], slices=c.split_k) for c in tiles]
        return [tile for tile in blocks if tile.rows * tile.columns < TILE_ROWS * WIDEST_TILE_COLUMNS * tile.slices]


def aligned_product(problem: CutlassProblem) -> AlignedProduct:
    """What the model of alignment asks of a product."""
    window = problem.window
    first, second = problem.operands
    return AlignedProduct(
        rows=problem.rows,
        columns=problem.columns,
        depth=problem.depth,
        batch=problem.batch,
        input_elements=prod(window.input_extents) if window else problem.batch * problem.rows * problem.depth,
        alignments=(first.alignment, second.alignment),
        itemsize_bytes=itemsize_bytes(problem.dtypes[0]),
        dtype=problem.dtypes[0],
    )


# ---- channels --------------------------------------------------------------------------------------------------------


UNPADDED = "stays as it is"
"""What a build does about a product that it does not pad."""


def alignment_advice(products: Iterable[ProductPadding]) -> tuple[AlignmentAdvice, ...]:
    """One entry for all products alike, those with most to gain first."""
    alike: dict[tuple[str, str, str], list[ProductPadding]] = {}
    for product in products:
        if product.depth[0] != product.depth[1] or product.columns[0] != product.columns[1]:
            alike.setdefault((product.operator, product.described, _handling(product)), []).append(product)
    entries = [_alignment(calls) for calls in alike.values()]
    return tuple(sorted(entries, key=lambda entry: -entry.gain_us))


def _alignment(calls: Sequence[ProductPadding]) -> AlignmentAdvice:
    first = calls[0]
    return AlignmentAdvice(
        operator=first.operator,
        described=first.described,
        calls=len(calls),
        depth=first.depth,
        columns=first.columns,
        now_us=sum(call.padded_us + call.padding_us if call.padded else call.plain_us for call in calls),
        aligned_us=sum(call.padded_us for call in calls),
        handled=_handling(first),
    )


def _handling(product: ProductPadding) -> str:
    if not product.padded:
        return UNPADDED
    if product.source == "kernel":
        return "padded by a kernel"
    return "padded by the kernel before" if product.source == "folded" else "padded by the product before"


# ---- activations -----------------------------------------------------------------------------------------------------


def _general(region: Region) -> str:
    """The reason without the names of values, which differ from call to call."""
    ended = region.record.ended
    return "epilogues have no such function" if " is used by " in ended else ended.partition(": ")[2] or ended


def function_behind(values: GraphValues, result: Var) -> tuple[Var, list[str]] | None:
    """What is computed of ``result`` and constants alone, up to the first value that everything goes through, and its
    operators; None where nothing is, or only a scale and a shift.
    """
    inside, names = [result], list[str]()
    pending = dict(values.followers_of(result))
    while pending:
        variable = pending.pop(min(pending))
        name = _step_of_one_value(values, variable, inside)
        if name is None:
            return None
        inside.append(variable)
        names.append(name.removeprefix("nn."))
        users = {user for value in inside[:-1] for user in values.users_of(value)}
        if users <= set(inside) and BENDING & {name, *(f"nn.{other}" for other in names), *names}:
            return variable, names
        pending.update(values.followers_of(variable))
    return None


def _step_of_one_value(values: GraphValues, variable: Var, inside: Sequence[Var]) -> str | None:
    operator = values.operator_of(values.bindings.get(variable))
    if operator is None or static_shape(variable) != static_shape(inside[0]):
        return None
    name, operands = operator
    known = all(one in inside or values.constant_of(one) is not None or not is_tensor(one) for one in operands)
    return name if known and (is_spelling(name) or name in BENDING) else None


# ---- together --------------------------------------------------------------------------------------------------------


def _combined(now_us: float, changes: dict[str, float]) -> tuple[CombinedAdvice, ...]:
    """``changes``, by the microseconds that each adds, alone and together; those that change nothing are none."""
    made = {name: added_us for name, added_us in changes.items() if added_us}
    chosen = [names for count in range(1, len(made) + 1) for names in combinations(made, count)]
    entries = [
        CombinedAdvice(changes=names, now_us=now_us, then_us=now_us + sum(made[name] for name in names))
        for names in chosen
    ]
    return tuple(sorted(entries, key=lambda entry: entry.then_us))


# ---- depth -----------------------------------------------------------------------------------------------------------


def _described(region: Region) -> str:
    window = region.record.problem.window
    assert window is not None
    stride = f", stride {window.strides[0]}" if max(window.strides) > 1 else ""
    return f"{described(region.members[0])} of {window.input_extents[3]} channels{stride}"


def _chain(first: CutlassProblem, *behind: CutlassProblem) -> ProductChain:
    """Products one behind the other, each with a bias."""
    products = (first, *behind)
    size = itemsize_bytes(first.dtypes[0])
    return product_chain(products, [product.columns * size for product in products], size)
