"""`python -m tvm_ext.cli` is ``tvm-ext``."""

from . import main

main()
