"""Discovery of methods, corpora, metrics and model families, built in or from other packages.

A built-in plug-in is a module or sub-package of the package of its kind, named after its file. One of another package
is an entry point in the group of its kind, which names a module that defines the attribute of its kind (`SPEC` of a
corpus), or the object itself:

    [project.entry-points."fedguild.corpora"]
    poems = "verses.poems"
    odes = "verses.poems:ODES"

Of some kinds a config may name `module:attribute` itself, which no package has to register.

Listing imports nothing: titles are read from the source. A plug-in that cannot be used is reported on its own and does
not affect the others.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pkgutil import iter_modules
from symtable import symtable
from traceback import walk_tb
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedguild.core.errors import ConfigError, in_one_line, nearest

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Found:
    """The description of a plug-in, read without importing it.

    Attributes:
        name: The name that configs use.
        title: First line of the docstring of its function or module, without the final period; else the summary
            of its distribution.
        origin: `fedguild`, or the name and version of the distribution that it comes from.
        target: The entry point, `module` or `module:attribute`; empty for a plug-in that is listed without code.
        fault: The reason why it cannot be used; empty if none is known.
    """

    name: str
    title: str
    origin: str
    target: str
    fault: str = ""

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
        package: The package whose modules are the built-in plug-ins.
        group: The entry-point group of other packages' plug-ins.
        accept: Called with a plug-in's name and the loaded object; returns the plug-in, or raises an exception whose
            message says why the object is not one.
        attribute: The attribute of a plug-in's module that is passed to `accept`. Modules of `package` that do not
            define it are not plug-ins. If empty, every module whose name does not begin with `_` is one, and `accept`
            receives the module.
        dashes: Whether `_` in a file name becomes `-` in the plug-in's name.
        listed: Returns name -> title of the built-in plug-ins that are data, not modules; `accept` receives None.
        unregistered: Whether `module:attribute` is a name, too. To load it runs code: `fedguild.config.trust` says of
            which configs, and `require_registered` of methods and `load_metrics` keep it from federations.
    """

    noun: str
    package: str
    group: str
    accept: Callable[[str, Any], T]
    attribute: str = ""
    dashes: bool = False
    listed: Callable[[], Mapping[str, str]] = dict
    unregistered: bool = False

    def found(self) -> tuple[Found, ...]:
        listed = tuple(Found(name, title, _root(self.package), "") for name, title in self.listed().items())
        return _discover(self.package, self.group, self.attribute, self.dashes, listed, tuple(sys.path))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(plugin.name for plugin in self.found() if not plugin.fault))

    def __contains__(self, name: object) -> bool:
        return any(plugin.name == name for plugin in self.found())

    def origin(self, name: str) -> str:
        """Returns `fedguild`, or the name and version of the distribution that a plug-in comes from; empty for none.

        Of `module:attribute` it is the module and a digest of its source.
        """
        return next((plugin.origin for plugin in self._named(name) if not plugin.fault), "")

    def _named(self, name: str) -> list[Found]:
        if self.unregistered and is_target(name):
            return [_unregistered(name)]
        return [plugin for plugin in self.found() if plugin.name == name]

    def load(self, name: str) -> T:
        """Imports a plug-in.

        Raises:
            ConfigError: there is no plug-in of this name, or it cannot be used.
        """
        known = self._named(name)
        if not known:
            installed = "One of another package is known once that is installed (docs/guides/plug-ins.md)."
            raise ConfigError(f"There is no {self.noun} '{name}'.", f"{nearest(name, self)} {installed}")
        plugin = min(known, key=lambda candidate: bool(candidate.fault))
        hint = "" if plugin.origin == _root(self.package) else f"Repair or uninstall {plugin.origin}."
        if plugin.name == plugin.target:
            hint = f"The name is MODULE:NAME; the module has to be installed or in the working folder, {os.getcwd()}."
        if plugin.fault:
            raise ConfigError(f"The {self.noun} {plugin.warning}.", hint)
        try:
            return self._accepted(plugin)
        except Exception as error:
            broken = replace(plugin, fault=_fault(plugin, error))
            raise ConfigError(f"The {self.noun} {broken.warning}", hint) from error

    def checked(self) -> Iterator[Found]:
        """Yields every plug-in after an attempt to load it, with the reason for a failure in `fault`."""
        for plugin in self.found():
            try:
                if not plugin.fault:
                    self._accepted(plugin)
                yield plugin
            except Exception as error:
                yield replace(plugin, fault=_fault(plugin, error))

    def _accepted(self, plugin: Found) -> T:
        loaded = EntryPoint(plugin.name, plugin.target, "").load() if plugin.target else None
        if self.attribute and isinstance(loaded, ModuleType):
            loaded = getattr(loaded, self.attribute)
        return self.accept(plugin.name, loaded)


def _fault(plugin: Found, error: Exception) -> str:
    """Returns what went wrong, and where in the plug-in's own package, if there."""
    own, told = plugin.target.partition(":")[0].partition(".")[0], in_one_line(error)
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if own != "fedguild" and module.partition(".")[0] == own:
            return f"{told} ({module}, line {line})"
    return told


def is_target(name: str) -> bool:
    """Whether a name is `module:attribute`, of something in Python that no package has to register."""
    return ":" in name


def search_working_folder() -> None:
    """Lets modules be imported from the working folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing installed is hidden by a file of the same name


def _unregistered(target: str) -> Found:
    search_working_folder()
    module, _, attribute = target.partition(":")
    source = _source(module)
    digest = "" if source is None else f", SHA-256 {hashlib.sha256(source.encode()).hexdigest()[:12]}"
    fault = "" if EntryPoint.pattern.fullmatch(target) else "it is not module:attribute"
    return Found(target, _title(source, attribute), f"{module}{digest}", target, fault)


def installed_plugins(group: str) -> tuple[Found, ...]:
    """Returns the plug-ins of an entry point's group, by name, without importing any."""
    return _discover("", group, "", False, (), tuple(sys.path))


@lru_cache(maxsize=64)
def _discover(
    package: str, group: str, attribute: str, dashes: bool, listed: tuple[Found, ...], path: tuple[str, ...]
) -> tuple[Found, ...]:
    """Returns the plug-ins of one kind, built-in ones first, then by name, without importing any.

    The parameters are the attributes of `Plugins`. A built-in plug-in keeps its name; if two other packages use the
    same name, neither is used. Both cases are recorded in `fault`. The search runs once per `sys.path`: packages
    installed later are found by the next process.
    """
    shipped = sorted((*listed, *_shipped(package, attribute, dashes)), key=lambda plugin: plugin.name)
    others = sorted(_installed(group), key=lambda plugin: (plugin.name, plugin.origin))
    uses = Counter(plugin.name for plugin in (*shipped, *others))
    for index, plugin in enumerate(others):
        if not plugin.fault and uses[plugin.name] > 1:
            origins = [each.origin for each in (*shipped, *others) if each.name == plugin.name]
            others[index] = replace(plugin, fault=f"{' and '.join(origins)} provide one of that name")
    return (*shipped, *others)


def _shipped(package: str, attribute: str, dashes: bool) -> Iterator[Found]:
    spec = _spec(package)
    for module in iter_modules((spec and spec.submodule_search_locations) or []):
        if module.name.startswith("_"):
            continue
        target = f"{package}.{module.name}"
        source = _source(target)
        if not attribute or source is None or _defines(source, attribute):
            name = module.name.replace("_", "-") if dashes else module.name
            yield Found(name, _title(source), _root(package), target)


def installed(package: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _installed(group: str) -> Iterator[Found]:
    """Yields a group's entry points, as `importlib.metadata.entry_points` does, but copes with broken distributions.

    `entry_points` raises for all distributions if the file of one, even an unrelated one, cannot be parsed.
    """
    present = [*distributions()]
    offering = [each for each in present if f"[{group}]" in (each.read_text("entry_points.txt") or "")]
    if not offering:  # names are read from the metadata of all distributions, which takes a tenth of a second
        return
    first = {re.sub(r"[-_.]+", "-", each.name).lower(): each for each in reversed(present)}
    for distribution in (each for each in first.values() if each in offering):
        origin = f"{distribution.name} {distribution.version}"
        try:
            entries = distribution.entry_points.select(group=group)
        except Exception as error:  # importlib.metadata passes on the errors of its parser
            yield Found(
                distribution.name, "", origin, "", f"its entry_points.txt cannot be read ({in_one_line(error)})"
            )
            continue
        for entry in entries:
            target = EntryPoint.pattern.fullmatch(entry.value)
            if target is None:
                fault, title = f"'{entry.value}' is not module or module:attribute", ""
            else:
                title = _title(_source(target["module"]), target["attr"])
                title = title or str(distribution.metadata.json.get("summary", ""))
                usable = _NAME.fullmatch(entry.name)
                fault = "" if usable else "a name has letters, digits, dots, dashes and underscores only"
            yield Found(entry.name, title, origin, entry.value, fault)


def _spec(module: str) -> ModuleSpec | None:
    """Returns the spec of a module without importing its parents, which `find_spec` would do."""
    root, *rest = module.split(".")
    try:
        spec = find_spec(root)
        for depth in range(2, len(rest) + 2):
            name = ".".join(module.split(".")[:depth])
            spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
    except (ImportError, ValueError):
        return None
    return spec


def _source(module: str) -> str | None:
    loader: Any = getattr(_spec(module), "loader", None)
    try:
        source = loader.get_source(module) or ""
        ast.parse(source)
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return None
    return str(source)


def _defines(source: str, name: str) -> bool:
    """Whether a module assigns, defines or imports a name at top level."""
    symbols = symtable(source, "", "exec").get_symbols()
    return any(each.get_name() == name and (each.is_assigned() or each.is_imported()) for each in symbols)


def _title(source: str | None, function: str | None = None) -> str:
    """Returns the first line of the docstring of a function, or else of its module."""
    tree = ast.parse(source or "")
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    text = next(filter(None, map(ast.get_docstring, named)), None) or ast.get_docstring(tree) or ""
    return text.partition("\n")[0].strip().removesuffix(".")


def _root(package: str) -> str:
    return package.partition(".")[0]
