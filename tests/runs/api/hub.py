"""A stand-in for the Hugging Face hub."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace


class Hub:
    """Stands in for `huggingface_hub.HfApi`."""

    def __init__(self, private: bool | None = None, refuses: str = "", endpoint: str = "https://hub.test") -> None:
        self.private, self.refuses, self.endpoint = private, refuses, endpoint
        self.created: list[tuple[str, bool]] = []
        self.files: dict[str, str] = {}

    def repo_exists(self, name: str) -> bool:
        return self.private is not None

    def repo_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.private)

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        if self.refuses:
            raise OSError(self.refuses)
        self.created.append((name, private))

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, delete_patterns: str | None = None
    ) -> None:
        """Adds a folder's files to those of the repository, and deletes others whose names match."""
        kept = {name: text for name, text in self.files.items() if not fnmatch(name, delete_patterns or "")}
        paths = sorted(Path(folder_path).iterdir())
        self.files = kept | {
            path.name: path.read_text("utf-8" if path.suffix in (".md", ".json") else "latin-1") for path in paths
        }
