from tests.report.conftest import run, run_folder

__all__ = ["run", "run_folder"]
