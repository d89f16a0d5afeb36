"""Run by Python at startup if this folder is on PYTHONPATH: makes a trainer process faulty."""

import sys

if "trainer" in sys.orig_argv:
    from tests.federation.flower.faulty_replies import corrupt_trainer

    corrupt_trainer()
