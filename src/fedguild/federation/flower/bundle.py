"""The app that a run of Flower carries, as a bundle: a zip file with a `pyproject.toml` that names the app's parts.

Flower sends the bundle from the server to the clients. FedGuild's names modules of the installed package and has no
code of its own, so a bundle with any code is not FedGuild's. The check executes nothing of the bundle.

Flower's own check, `--trusted-entities`, accepts only signatures that its Hub adds to an app from the Hub.
"""

from __future__ import annotations

import tomllib
import zipfile
from io import BytesIO

PROJECT, CONTENTS = "pyproject.toml", ".info/CONTENT"
"""The app's description, and the list of the bundle's files that Flower adds."""
LARGEST_BYTES = 2**20


def build(project: str) -> bytes:
    """Returns Flower's bundle of an app whose only file is this `pyproject.toml`."""
    from flwr.cli.build import build_fab_from_files

    return build_fab_from_files({PROJECT: project.encode()})[0]


def refusal(bundle: bytes, project: str) -> str:
    """Returns why a bundle is not the app that this `pyproject.toml` describes; empty if it is.

    Flower rewrites the file, and a zip file depends on the library that compresses it, so values are compared rather
    than bytes.

    Args:
        bundle: The bundle, untrusted.
        project: The text of the trusted app's `pyproject.toml`.
    """
    try:
        with zipfile.ZipFile(BytesIO(bundle)) as archive:
            files = archive.infolist()
            names = [file.filename for file in files]
            if foreign := sorted({*names} - {PROJECT, CONTENTS}):
                return f"it brings code or data of its own ({foreign[0]!r:.80})"
            if len(names) != len({*names}) or PROJECT not in names:
                return "it is no bundle of one app"
            if sum(file.file_size for file in files) > LARGEST_BYTES:
                return f"it is larger than {LARGEST_BYTES} bytes"
            described = tomllib.loads(archive.read(PROJECT).decode())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        return f"it cannot be read ({type(error).__name__})"
    return "" if described == tomllib.loads(project) else "its description is not that of this version of FedGuild"
