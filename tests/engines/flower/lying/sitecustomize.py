"""Python runs this at its start where the folder is on PYTHONPATH: a trainer that starts with it lies."""

import sys

if "trainer" in sys.orig_argv:
    from tests.engines.flower.lies import lie

    lie()
