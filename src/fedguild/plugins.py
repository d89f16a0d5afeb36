"""Discovery of the methods, corpora, metrics and model families that ship with FedGuild or come from other packages.

No list names the plug-ins. One that ships is a module (or a sub-package) in the package of its kind, named after its
file. One of another package is an entry point in the group of its kind:

    [project.entry-points."fedguild.corpora"]
    poems = "verses.poems"

An entry point names a module, which then defines the attribute of its kind (`SPEC` of a corpus), or the
object itself (`verses.poems:SPEC`). Listing names, titles and origins imports nothing: titles are read from the source.
A plug-in that cannot be used is reported by itself and does not affect the others.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedguild.errors import ConfigError, nearest

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET = re.compile(r"(?P<module>\w+(\.\w+)*)(:(?P<attribute>\w+(\.\w+)*))?")


@dataclass(frozen=True)
class Found:
    """The description of a plug-in, read without importing it.

    Attributes:
        name: The name that configs use.
        title: First line of the docstring of its function or module, without the final period; else the summary
            of its distribution.
        origin: `fedguild`, or the name and version of the distribution that it comes from.
        target: The entry point, `module` or `module:attribute`.
        fault: The reason why it cannot be used; empty if none is known.
    """

    name: str
    title: str
    origin: str
    target: str
    fault: str = ""

    def load(self) -> Any:
        """Imports and returns the target, and passes on any exception of the import."""
        return EntryPoint(self.name, self.target, "").load()

    @property
    def warning(self) -> str:
        """The fault in one line, with the plug-in's name and origin."""
        return f"{self.name} ({self.origin}) cannot be used: {self.fault}"


@dataclass(frozen=True)
class Plugins(Generic[T]):
    """The plug-ins of one kind.

    Iteration, `in` and `found` import no plug-in; `load` imports one, `checked` imports all.

    Attributes:
        noun: The kind in messages, for example `corpus`.
        package: The package whose modules are the plug-ins that ship.
        group: The entry-point group of other packages' plug-ins.
        accept: Called with a plug-in's name and the loaded object; returns the plug-in, or raises an exception whose
            message gives the reason why the object is not one.
        attribute: The attribute of a plug-in's module that is passed to `accept`. Modules of `package` that do not
            define it at top level are not plug-ins. If empty, every module whose name does not begin with `_` is one,
            and `accept` gets the module.
        dashes: Whether `_` in a file name becomes `-` in the plug-in's name.
    """

    noun: str
    package: str
    group: str
    accept: Callable[[str, Any], T]
    attribute: str = ""
    dashes: bool = False

    def found(self) -> tuple[Found, ...]:
        """Returns every plug-in, those that ship first, then by name; see `discover`."""
        return discover(self.package, self.group, attribute=self.attribute, dashes=self.dashes)

    def __iter__(self) -> Iterator[str]:
        """Yields the names of plug-ins without a known fault, in alphabetical order."""
        return iter(sorted(plugin.name for plugin in self.found() if not plugin.fault))

    def __contains__(self, name: object) -> bool:
        """Whether there is a plug-in of this name, usable or not."""
        return any(plugin.name == name for plugin in self.found())

    def load(self, name: str) -> T:
        """Imports a plug-in.

        Raises:
            ConfigError: there is no plug-in of this name, or it cannot be used.
        """
        known = [plugin for plugin in self.found() if plugin.name == name]
        if not known:
            raise ConfigError(f"There is no {self.noun} '{name}'.", nearest(name, self))
        plugin = min(known, key=lambda candidate: bool(candidate.fault))
        hint = "" if plugin.origin == _root(self.package) else f"Repair or uninstall {plugin.origin}."
        if plugin.fault:
            raise ConfigError(f"The {self.noun} {plugin.warning}.", hint)
        try:
            return self._accepted(plugin)
        except Exception as error:
            broken = replace(plugin, fault=_reason(error))
            raise ConfigError(f"The {self.noun} {broken.warning}", hint) from error

    def checked(self) -> Iterator[Found]:
        """Yields every plug-in after an attempt to load it, with the reason for a failure in `fault`."""
        for plugin in self.found():
            fault = plugin.fault
            if not fault:
                try:
                    self._accepted(plugin)
                except Exception as error:
                    fault = _reason(error)
            yield replace(plugin, fault=fault)

    def _accepted(self, plugin: Found) -> T:
        loaded = plugin.load()
        if self.attribute and isinstance(loaded, ModuleType):
            loaded = getattr(loaded, self.attribute)
        return self.accept(plugin.name, loaded)


def discover(package: str, group: str, *, attribute: str = "", dashes: bool = False) -> tuple[Found, ...]:
    """Returns the plug-ins of one kind, those that ship first, then by name, without importing any.

    A plug-in that ships keeps its name; if two other packages use the same name, neither is used. Both cases are
    recorded in `fault`. The search runs once per `sys.path`: packages installed later are found by the next process.

    Args:
        package: The package whose modules are the plug-ins that ship.
        group: The entry-point group of other packages' plug-ins.
        attribute: Only modules of `package` that define it at top level count; empty for all.
        dashes: Whether `_` in a file name of `package` becomes `-` in the name.
    """
    return _discover(package, group, attribute, dashes, tuple(sys.path))


@lru_cache(maxsize=64)
def _discover(package: str, group: str, attribute: str, dashes: bool, path: tuple[str, ...]) -> tuple[Found, ...]:
    shipped = sorted(_shipped(package, attribute, dashes), key=lambda plugin: plugin.name)
    others = sorted(_installed(group), key=lambda plugin: (plugin.name, plugin.origin))
    origins: defaultdict[str, list[str]] = defaultdict(list)
    for plugin in (*shipped, *others):
        origins[plugin.name].append(plugin.origin)
    for index, plugin in enumerate(others):
        if not plugin.fault and len(origins[plugin.name]) > 1:
            others[index] = replace(plugin, fault=f"{' and '.join(origins[plugin.name])} provide one of that name")
    return (*shipped, *others)


def _shipped(package: str, attribute: str, dashes: bool) -> Iterator[Found]:
    spec = _spec(package)
    for module in iter_modules((spec and spec.submodule_search_locations) or []):
        if module.name.startswith("_"):
            continue
        tree = _parsed(f"{package}.{module.name}")
        if not attribute or tree is None or attribute in _defined(tree):
            name = module.name.replace("_", "-") if dashes else module.name
            yield Found(name, _title(tree), _root(package), f"{package}.{module.name}")


def _installed(group: str) -> Iterator[Found]:
    """Yields the entry points of a group; the first distribution of a name on `sys.path` counts."""
    seen = set()
    for distribution in distributions():
        if f"[{group}]" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = str(distribution.metadata.json.get("name"))
        normalised = re.sub(r"[-_.]+", "-", name).lower()
        if normalised in seen:
            continue
        seen.add(normalised)
        origin = f"{name} {distribution.version}"
        try:
            entries = distribution.entry_points.select(group=group)
        except Exception as error:  # importlib.metadata passes on the errors of its parser
            yield Found(name, "", origin, "", f"its entry_points.txt cannot be read ({_reason(error)})")
            continue
        for entry in entries:
            yield _of_entry(entry, distribution, origin)


def _of_entry(entry: EntryPoint, distribution: Distribution, origin: str) -> Found:
    target = _TARGET.fullmatch(entry.value)
    if target is None:
        return Found(entry.name, "", origin, entry.value, f"'{entry.value}' is not module or module:attribute")
    fault = "" if _NAME.fullmatch(entry.name) else "a name has letters, digits, dots, dashes and underscores only"
    title = _title(_parsed(target["module"]), target["attribute"]) or distribution.metadata.json.get("summary", "")
    return Found(entry.name, str(title), origin, entry.value, fault)


def _spec(module: str) -> ModuleSpec | None:
    """Returns the spec from which a module would be imported, without importing its parents."""
    name, *rest = module.split(".")
    try:
        spec = find_spec(name)
        for part in rest:
            name = f"{name}.{part}"
            spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec else None
    except (ImportError, ValueError):
        return None
    return spec


def _parsed(module: str) -> ast.Module | None:
    """Returns a module's syntax tree; None if there is no source that can be parsed."""
    spec = _spec(module)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return None
    try:
        return ast.parse(spec.loader.get_source(module) or "")
    except (ImportError, OSError, SyntaxError, ValueError):
        return None


def _title(tree: ast.Module | None, function: str | None = None) -> str:
    """Returns the first line of the docstring of a function, or else of its module."""
    if tree is None:
        return ""
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    text = next(filter(None, map(ast.get_docstring, named)), None) or ast.get_docstring(tree) or ""
    return text.partition("\n")[0].strip().removesuffix(".")


def _defined(tree: ast.Module) -> set[str]:
    """Returns the names that a module assigns, defines or imports at top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _root(package: str) -> str:
    return package.partition(".")[0]


def _reason(error: Exception) -> str:
    """Returns an exception in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
