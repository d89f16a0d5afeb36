"""Discovery: what ships, what installed packages add, and what is broken, without importing any of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import ConfigError
from fedguild.core.plugins import Found, Plugins
from tests.plugins import install

SHIPPED = {
    "zoo/__init__.py": "",
    "zoo/kinds/__init__.py": "",
    "zoo/kinds/grey_wolf.py": '"""Wolves.\n\nMore of them."""\nANIMAL = "wolf"\nraise_if_imported = 1 / 0\n',
    "zoo/kinds/bears/__init__.py": '"""Bears, a folder of them."""\nfrom zoo.kinds.bears.brown import ANIMAL\n',
    "zoo/kinds/bears/brown.py": 'ANIMAL: str = "bear"\n',
    "zoo/kinds/helpers.py": '"""No animal at all."""\n',
    "zoo/kinds/_private.py": 'ANIMAL = "hidden"\n',
}


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose sub-package `kinds` holds the plug-ins that ship."""
    install(monkeypatch, tmp_path / "zoo", "zoo", entry_points="", modules=SHIPPED)
    return tmp_path


def animal(name: str, loaded: Any) -> str:
    if not isinstance(loaded, str):
        raise TypeError(f"{name} is a {type(loaded).__name__}, not a str")
    return loaded


def animals(package: str = "zoo.kinds") -> Plugins[str]:
    return Plugins("animal", package, "zoo.animals", animal, attribute="ANIMAL", dashes=True)


def by_name(package: str = "zoo.kinds") -> dict[str, Found]:
    return {plugin.name: plugin for plugin in animals(package).found()}


def test_modules_that_define_the_attribute_ship_and_are_not_imported(zoo: Path):
    assert animals().found() == (
        Found("bears", "Bears, a folder of them", "zoo", "zoo.kinds.bears"),
        Found("grey-wolf", "Wolves", "zoo", "zoo.kinds.grey_wolf"),
    )
    assert not [name for name in sys.modules if name.split(".")[0] == "zoo"]


def test_entry_points_are_found_with_title_and_origin(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    sources = {
        "ark/__init__.py": "1 / 0",
        "ark/cats.py": '"""Cats of all sizes."""\nANIMAL = "cat"\n',
        "ark/calls.py": '"""Calls."""\ndef moo():\n    """The call of a cow.\n\n    Loud."""\ndef baa():\n    pass\n',
    }
    entries = """
        [console_scripts]
        ark = ark:main
        [zoo.animals]
        cat = ark.cats
        moo = ark.calls:moo
        baa = ark.calls:baa
        far = nowhere.to.be.found:ANIMAL
    """
    install(monkeypatch, zoo / "ark", "the-ark", entry_points=entries, modules=sources, summary="Two of each")
    origin = "the-ark 1.2"
    assert animals().found()[2:] == (
        Found("baa", "Calls", origin, "ark.calls:baa"),
        Found("cat", "Cats of all sizes", origin, "ark.cats"),
        Found("far", "Two of each", origin, "nowhere.to.be.found:ANIMAL"),
        Found("moo", "The call of a cow", origin, "ark.calls:moo"),
    )
    assert "ark" not in sys.modules
    assert [animals().origin(name) for name in ("cat", "bears", "dodo")] == [origin, "zoo", ""]


def test_a_plugin_is_loaded_from_its_module_or_itself(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    sources = {"ark.py": 'ANIMAL = "cat"\nclass Kennel:\n    dog = "dog"\n'}
    entries = "[zoo.animals]\ncat = ark\ndog = ark:Kennel.dog\n"
    install(monkeypatch, zoo / "ark", "ark", entry_points=entries, modules=sources)
    found = animals()
    assert [found.load(name) for name in ("bears", "cat", "dog")] == ["bear", "cat", "dog"]
    assert list(found) == ["bears", "cat", "dog", "grey-wolf"]
    assert "cat" in found
    assert "cow" not in found
    with pytest.raises(
        ConfigError, match=r"There is no animal 'bear'\.\nDid you mean 'bears'\? Known: bears, cat, dog,"
    ):
        found.load("bear")


BROKEN = {
    "absent": ("nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    "raises": ("broken.raises", "RuntimeError: no licence found (broken.raises, line 1)"),
    "unparsable": ("broken.unparsable", "SyntaxError: "),
    "lacks": ("broken.fine:COW", "AttributeError: module 'broken.fine' has no attribute 'COW'"),
    "wrong": ("broken.fine:NUMBER", "TypeError: wrong is a int, not a str"),
    "malformed": ("broken fine", "'broken fine' is not module or module:attribute"),
    "bad name!": ("broken.fine", "a name has letters, digits, dots, dashes and underscores only"),
}


@pytest.fixture
def broken(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins[str]:
    """A kind with every sort of broken plug-in among those of one package, one of which works."""
    sources = {
        "broken/__init__.py": "",
        "broken/fine.py": '"""Fine."""\nANIMAL = "cat"\nNUMBER = 3\n',
        "broken/raises.py": "raise RuntimeError('no licence found\\nbuy one')\n",
        "broken/unparsable.py": "def\n",
    }
    entries = "\n".join(["[zoo.animals]", "cat = broken.fine", *(f"{name} = {BROKEN[name][0]}" for name in BROKEN)])
    install(monkeypatch, zoo / "broken", "broken", entry_points=entries, modules=sources)
    return animals("zoo.nothing")


def test_broken_plugins_are_named_in_a_line_and_leave_the_others_alone(broken: Plugins[str]):
    checked = {plugin.name: plugin for plugin in broken.checked()}
    assert checked.pop("cat").fault == ""
    assert checked.keys() == BROKEN.keys()
    for name, plugin in checked.items():
        assert plugin.warning.startswith(f"{name} (broken 1.2) cannot be used: {BROKEN[name][1]}")
        assert "\n" not in plugin.warning
    assert broken.load("cat") == "cat"


def test_what_ships_keeps_its_name(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, zoo / "ark", "ark", entry_points="[zoo.animals]\nbears = ark:BEARS\n")
    assert animals().load("bears") == "bear"
    assert list(animals()) == ["bears", "grey-wolf"]
    faults = [plugin for plugin in animals().found() if plugin.fault]
    assert [plugin.warning for plugin in faults] == [
        "bears (ark 1.2) cannot be used: zoo and ark 1.2 provide one of that name"
    ]


def test_of_two_packages_with_one_name_neither_is_used(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("ark", "boat"):
        install(monkeypatch, zoo / name, name, entry_points=f"[zoo.animals]\ncat = {name}:CAT\n")
    assert "cat" not in list(animals())
    assert "cat" in animals()
    with pytest.raises(
        ConfigError, match=r"The animal cat \(ark 1.2\) cannot be used: ark 1.2 and boat 1.2 provide one"
    ):
        animals().load("cat")


def test_entry_points_that_cannot_be_parsed_stop_nobody(zoo: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, zoo / "bad", "bad", entry_points="[zoo.animals]\ncat\n")
    install(monkeypatch, zoo / "ark", "ark", entry_points="[zoo.animals]\ndog = ark:DOG\n")
    found = by_name("zoo.nothing")
    assert list(found) == ["bad", "dog"]
    assert found["bad"].warning.startswith(
        "bad (bad 1.2) cannot be used: its entry_points.txt cannot be read (TypeError"
    )


def test_listing_imports_neither_torch_nor_the_plugins():
    code = """
import sys
from fedguild.core.plugins import Plugins
for package, group in (("methods", "methods"), ("data.corpora", "corpora")):
    assert len(Plugins("kind", f"fedguild.{package}", f"fedguild.{group}", print).found()) > 9
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "fedguild"))
print(" ".join(loaded))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["fedguild", "fedguild.core", "fedguild.core.errors", "fedguild.core.plugins"]
