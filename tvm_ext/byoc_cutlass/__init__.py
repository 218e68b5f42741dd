"""CUTLASS kernels for parts of the graph (Bolt): which parts, and matrix products as templates in source text.

*Which parts.* Start at `patterns.regions_of`, then `support.problem_of`.

*Templates.* A `family.TemplateFamily` has the templates for one kind of region; start there. `products` are those of
matrix products: `gemm` and `epilogue` say what is wanted as data, `legality` what compiles, `ranking` what is fast,
`evt` makes visitor trees of epilogues, `emit` writes the source. `convolutions` are products that are read through
windows (`convolution`, `emit_convolution`), with `implicit.cuh`, `direct.cuh` and `epilogue_function`,
which are ours; `depthwise` has the direct template. `pairs` are two products in one kernel (`back_to_back`). What is
particular to the package ``nvidia-cutlass`` is in `_cutlass`, what all texts have in common in `kernel_text`.

*Regions.* `selection` gives a region its templates and its launch, `host` writes the functions that a model calls.

Not here: the passes that cut the graph and compile (`relay_passes/partition_cutlass.py`, `compile_cutlass.py`); what an
epilogue saves (`cost/epilogue_traffic.py`); compiling the texts (`toolchains/cutlass_toolchain.py`); tensor-core
kernels of our own (`tir_passes/emit/mma_tiles`).
"""
