"""A merged model as one GGUF file, written by llama.cpp's converter, if that is on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from fedguild.core.errors import ModelError

FILE = "model.gguf"
SCRIPT, VARIABLE = "convert_hf_to_gguf.py", "LLAMA_CPP"
_SAID = 500


def require_converter() -> Path:
    """Returns llama.cpp's converter.

    Raises:
        ModelError: it is neither on the PATH nor in the folder that LLAMA_CPP names.
    """
    places = [Path(os.environ[VARIABLE]) / SCRIPT] if os.environ.get(VARIABLE) else []
    places += [Path(found)] if (found := shutil.which(SCRIPT)) else []
    for place in places:
        if place.is_file():
            return place
    raise ModelError(
        f"A GGUF file is written by llama.cpp's converter, {SCRIPT}, which is not on the PATH.",
        f"Get llama.cpp and its Python requirements, and set {VARIABLE} to its folder; or take the merged form, which "
        "it converts on another machine.",
    )


def write_gguf(merged: Path, file: Path) -> None:
    """Converts a checkpoint.

    Args:
        merged: Its folder, with its tokenizer.
        file: The file to write.

    Raises:
        ModelError: there is no converter, or it does not know the model.
    """
    command = [sys.executable, str(require_converter()), str(merged), "--outfile", str(file), "--outtype", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        said = (done.stderr or done.stdout).strip()[-_SAID:]
        raise ModelError(
            f"llama.cpp's converter wrote no GGUF file: {said or f'it ended with {done.returncode}'}",
            "Export the merged form; a newer llama.cpp may know this model.",
        )
