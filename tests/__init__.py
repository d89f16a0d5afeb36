"""The tests. Triton's kernels run in its interpreter, which must be chosen before the first import of triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
