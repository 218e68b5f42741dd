"""Random legal configurations of CUTLASS's templates, compiled: what is proposed is what the headers take.

`draw` draws a configuration of every kind of template with an epilogue of its own, `units` compiles many of them at
once and finds the one that a compiler refuses. `products` and `convolutions` have what the tests of templates share.
"""
