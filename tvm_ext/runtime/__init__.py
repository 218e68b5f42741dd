"""A built model: running it, from several threads and forked processes, exporting it and loading it again.

Not here: compiling (`pass_pipeline.py`, `toolchains`). Most of it works with TVM's runtime alone.
Start at `library.Library`.
"""
