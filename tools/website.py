"""The documentation as a site: lays out the pages that `mkdocs.yml` names, and has Zensical build them.

Pages read well where they are, in the repository, and link to files there. In a site those links would lead nowhere, so
the pages are copied to `build/pages`, and a link to a file outside of `docs/` becomes one to a page: the guide for
contributors, the changelog, and every source file that a page links to. The notebook becomes a page as well.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
PAGES, SITE, CONFIG = BUILD / "pages", BUILD / "site", BUILD / "mkdocs.yml"
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Files beside `docs/` -> their pages."""
FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
PICTURES = (".png", ".svg")
LEXERS = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".json": "json"}


class BrokenLinkError(Exception):
    """A page links to a file that is not there."""


def pages() -> dict[str, str]:
    """Returns path below the site -> Markdown, for every page but those of single source files.

    Raises:
        BrokenLinkError: a page links to a file that is not there.
    """
    found = {page.relative_to(DOCS).as_posix(): page.read_text("utf-8") for page in sorted(DOCS.rglob("*.md"))}
    found |= {page: (ROOT / name).read_text("utf-8") for name, page in OUTSIDE.items() if name != "README.md"}
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        found[notebook.relative_to(DOCS).with_suffix(".md").as_posix()] = as_page(notebook)
    return found


def lay_out(folder: Path = PAGES) -> dict[str, str]:
    """Writes all pages and pictures into a new folder and returns path -> Markdown.

    Raises:
        BrokenLinkError: a page links to a file that is not there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    sources: dict[str, Path] = {}
    written = {path: with_links(text, path, sources) for path, text in pages().items()}
    written |= {page: source_page(source) for page, source in sources.items()}
    for path, text in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    for picture in (file for file in DOCS.rglob("*") if file.suffix in PICTURES):
        target = folder / picture.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)
    return written


def with_links(text: str, path: str, sources: dict[str, Path]) -> str:
    """Returns a page whose links lead to pages.

    Args:
        text: The page.
        path: Its path below the site.
        sources: Gets page -> file for every source file that it links to.

    Raises:
        BrokenLinkError: it links to a file that is not there.
    """
    origin = next((ROOT / name for name, page in OUTSIDE.items() if page == path and name != "README.md"), DOCS / path)

    def relinked(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        file = Path(os.path.normpath(origin.parent / target))
        if not file.exists() or not file.is_relative_to(ROOT):
            raise BrokenLinkError(f"{origin.relative_to(ROOT)} links to {target}, which is not there.")
        return posixpath.relpath(page_of(file, sources), posixpath.dirname(path) or ".") + anchor

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(relinked, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(relinked, text[end:])])


def page_of(file: Path, sources: dict[str, Path]) -> str:
    """Returns the path of a file's page below the site; notes it in `sources` if that has to be made."""
    inside = file.relative_to(ROOT).as_posix()
    if inside in OUTSIDE:
        return OUTSIDE[inside]
    if file.is_relative_to(DOCS) and file.suffix in (".md", ".ipynb", *PICTURES):
        path = file.relative_to(DOCS)
        return (path.with_suffix(".md") if file.suffix == ".ipynb" else path).as_posix()
    if file.is_dir():
        file /= "__init__.py" if (file / "__init__.py").is_file() else "README.md"
        return page_of(file, sources)
    page = f"source/{inside}.md"
    sources[page] = file
    return page


def source_page(file: Path) -> str:
    """Returns a page that shows a source file."""
    content, fence = file.read_text("utf-8"), "`" * 6
    return f"# `{file.relative_to(ROOT)}`\n\n{fence}{LEXERS.get(file.suffix, 'text')}\n{content.rstrip()}\n{fence}\n"


def as_page(notebook: Path) -> str:
    """Returns a notebook as a page: its texts, its code, and what that printed and showed (figures, tables, text)."""
    parts = []
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```")
            outputs = cell.get("outputs", ())
            printed = "".join("".join(output.get("text", "")) for output in outputs)
            parts += [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []
            parts += [shown for output in outputs if (shown := _shown(output.get("data", {})))]
    return "\n\n".join(parts) + "\n"


def _shown(data: Mapping[str, Any]) -> str:
    """Returns an output of a notebook's cell for a page: as HTML or SVG if it has that form, else as text."""
    for form in ("text/html", "image/svg+xml"):
        if form in data:
            return f'<div class="output">\n{_one_block("".join(data[form]))}\n</div>'
    text = "".join(data.get("text/plain", "")).rstrip()
    return f"```text\n{text}\n```" if text else ""


def _one_block(markup: str) -> str:
    """Returns HTML that Markdown takes as it is: a blank line would end it, an indented one begin a block of code."""
    without = re.sub(r"<style\b.*?</style>", "", markup, flags=re.DOTALL)
    return "\n".join(line.strip() for line in without.splitlines() if line.strip())


def navigation(nav: Sequence[Any], known: Mapping[str, str]) -> list[Any]:
    """Returns `nav` with `folder/*` written out: the pages of the folder that nothing else names, in order."""
    named = set(_leaves(nav))

    def expanded(entry: Any) -> Iterator[Any]:
        if isinstance(entry, Mapping):
            yield {title: below if isinstance(below, str) else navigate(below) for title, below in entry.items()}
        elif entry.endswith("/*"):
            folder = entry[:-1]
            yield from sorted(path for path in known if posixpath.dirname(path) + "/" == folder and path not in named)
        else:
            yield entry

    def navigate(entries: Sequence[Any]) -> list[Any]:
        return [each for entry in entries for each in expanded(entry)]

    return navigate(nav)


def _leaves(nav: Sequence[Any]) -> Iterator[str]:
    for entry in nav:
        below = entry.values() if isinstance(entry, Mapping) else [entry]
        for each in below:
            yield from [each] if isinstance(each, str) else _leaves(each)


def config(known: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of the site with its folders and the whole navigation."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    for plugin in settings["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    shown = navigation(settings["nav"], known)
    return {**settings, "docs_dir": PAGES.name, "site_dir": SITE.name, "nav": shown}


def main() -> int:
    """Lays out the pages and builds the site; with --serve, serves it and looks for changes of the laid-out pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve the site at http://localhost:8000")
    arguments = parser.parse_args()
    try:
        known = lay_out()
    except BrokenLinkError as error:
        print(error, file=sys.stderr)
        return 1
    CONFIG.write_text(yaml.safe_dump(config(known), sort_keys=False, allow_unicode=True), "utf-8")
    command = ["serve"] if arguments.serve else ["build", "--clean", "--strict"]
    return subprocess.run([sys.executable, "-m", "zensical", *command, "--config-file", str(CONFIG)]).returncode


if __name__ == "__main__":
    sys.exit(main())
