"""The command line: a file per sub-command, each a thin wrapper around a function.

Data goes to stdout, progress and errors to stderr. An error that the user can fix (`FedGuildError`) is printed as one
message with exit code 2; an interrupted run says how to resume and exits with 130.
"""

from fedguild.cli.app import app, main

__all__ = ["app", "main"]
