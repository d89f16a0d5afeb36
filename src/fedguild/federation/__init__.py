"""Federations with real clients: the programs on the server's and the clients' machines, and their files.

`serving` runs the round loop over the `flower` engine; `trainer_service` answers the server's requests on a client's
machine, within the limits of its `site_policy`. `project` writes a new federation, `checks` finds its faults, and
`commands` and `operations` start Flower's programs. Nothing is imported here, because the process that handles a
message on a client's machine must start quickly.
"""

SERVER_FOLDER = "FEDGUILD_SERVER_FOLDER"
WORK_FOLDER = "FEDGUILD_SITE_WORK"
"""Environment variables that tell our apps inside Flower's processes where their files are."""
