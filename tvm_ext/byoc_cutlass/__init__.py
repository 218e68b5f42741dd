"""CUTLASS kernels for parts of the graph (Bolt): which parts, and matrix products as templates in source text.

*Which parts.* Start at `patterns.regions_of`, then `support.problem_of`.

*Templates.* `gemm` and `epilogue` say what is wanted as data, `configs` which templates fit a device (`legality` what
compiles, `ranking` what is fast), `evt` makes visitor trees of epilogues, `emit` writes the source. What is particular
to the package ``nvidia-cutlass`` is in `_cutlass`. Start at `configs.propose`, then `emit.emit_gemm`.

*Convolutions* are matrix products that are read through windows: `convolution` says what is wanted,
`convolution_configs` which templates fit (`convolution_legality`, `convolution_ranking`), `emit_convolution` writes the
source, with `convolution_kernels` and `epilogue_function`, which are ours.

*Both.* `selection` gives a region its templates and its launch, `host` writes the functions that a model calls.

Not here: the passes that cut the graph and compile (`relay_passes/partition_cutlass.py`, `compile_cutlass.py`); what an
epilogue saves (`cost/epilogue_traffic.py`); compiling the texts (`toolchains/cutlass_toolchain.py`); tensor-core
kernels of our own (`tir_passes/emit/mma_tiles`).
"""
