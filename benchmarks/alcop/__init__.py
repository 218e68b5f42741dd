"""ALCOP's search over tiles and stages of a GPU's products, and the searches that it is compared with.

No build uses it: there is no GPU here on which its candidates were measured. `tile_space` has the candidates of a
product, `analytical` predicts them all, `simulated_gpu` gives them times, `searches` has what `tvm_ext.autotune.search`
is compared with; `printed` is the paper's model to the letter.
"""
