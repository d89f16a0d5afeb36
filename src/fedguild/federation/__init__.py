"""A federation with real clients: what the server's machine does, what a client's does, and their files.

`serving` runs the round loop over the engine `flower`; `desk` is what a client's trainer answers;
`agreement` is what a client refuses. `project` writes a new federation, `checks` says what is wrong with
one, and `commands` starts Flower's programs. Nothing is imported here, since the process that handles a
message on a client's machine must start quickly.
"""

SERVER_FOLDER = "FEDGUILD_SERVER_FOLDER"
WORK_FOLDER = "FEDGUILD_SITE_WORK"
"""The environment variables that tell our apps, inside Flower's processes, where their files are."""
