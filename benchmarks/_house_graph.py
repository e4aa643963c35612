"""Who imports whom inside a package, by its syntax trees.

Function-level and type-checking imports count, and so does the whole name of a module in a string, as tables have them.
A name that a package merely passes on is followed to the module that makes it: the package is not reached by that, nor
what else it passes on. What is put together at run time, `import_module(f"…{name}")`, is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOFS = ("cli", "explorer", "__main__")
"""Rooms above the systems: what they reach is shared."""
USERS = ("users", "")
"""They reach what a shared room's packages list in `__all__`."""
MOVED = "_moved.py"
"""The table of old names, which reaches nothing by naming it."""

Use = tuple[int, str]
"""Line of an import, and the module that is reached by it."""
Import = tuple[int, str, str | None, str]
"""Line, module, name taken from it (None in `import module`), and the name that it is bound to."""


@dataclass(frozen=True)
class Tree:
    """The modules of a package: dotted name -> path from its folder, path -> text; the same of its packages' stubs."""

    package: str
    paths: Mapping[str, str]
    texts: Mapping[str, str]
    stubs: Mapping[str, str]

    @classmethod
    def read(cls, root: Path) -> Tree:
        texts, stubs = (
            {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(root.rglob(name))}
            for name in ("*.py", "__init__.pyi")
        )
        return cls(root.name, {dotted(root.name, path): path for path in texts}, texts, stubs)

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        return {module: ast.parse(self.texts[path]) for module, path in self.paths.items()}

    @cached_property
    def uses(self) -> dict[str, list[Use]]:
        """Module -> what it imports, names that a package merely passes on followed to where they are made."""
        return {module: sorted(set(self._uses(module))) for module in self.paths}

    def is_package(self, module: str) -> bool:
        return self.paths[module].endswith("__init__.py")

    def imports(self, module: str) -> Iterator[Import]:
        """What it imports of this package."""
        yield from imports(self.syntax[module], self.package, module, self.is_package(module))

    @cached_property
    def _passed_on(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Package -> name -> (module, name in it), of what it gives and does not make: what its `__init__` or its stub
        imports and does not use, and tables {submodule: names} for `leafward._lazy`."""
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for package in filter(self.is_package, self.paths):
            syntax, stub = self.syntax[package], self.stubs.get(f"{self.paths[package]}i", "")
            used = {node.id for node in ast.walk(syntax) if isinstance(node, ast.Name)}
            named = [*self.imports(package), *imports(ast.parse(stub), self.package, package, True)]
            found[package] = {
                bound: (source, name) for _, source, name, bound in named if name is not None and bound not in used
            }
            for submodule, name in tables(syntax):
                if f"{package}.{submodule}" in self.paths:
                    found[package].setdefault(name, (f"{package}.{submodule}", name))
        return found

    def home(self, module: str, name: str) -> str | None:
        """The module that `name` of `module` is or comes from; None if there is no such module."""
        for _ in range(len(self.paths)):  # a chain of packages that pass a name on
            if f"{module}.{name}" in self.paths:
                return f"{module}.{name}"
            if module not in self.paths or name not in self._passed_on.get(module, {}):
                break
            module, name = self._passed_on[module][name]
        return module if module in self.paths else None

    def _uses(self, module: str) -> Iterator[Use]:
        passed_on = self._passed_on.get(module, {})
        packages: dict[str, list[Use]] = {}
        for line, source, name, bound in self.imports(module):
            if name is not None and bound in passed_on:
                continue
            target = source if name is None else self.home(source, name)
            if target is None or target not in self.paths:
                continue
            is_bound = bound != self.package if name is None else target != source
            if is_bound and self.is_package(target):
                packages.setdefault(bound, []).append((line, target))
            else:
                yield line, target
        yield from self._through(module, packages)
        if self.paths[module] != MOVED:
            for node in ast.walk(self.syntax[module]):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in self.paths:
                    yield node.lineno, node.value

    def _through(self, module: str, packages: Mapping[str, list[Use]]) -> Iterator[Use]:
        """What is reached through packages bound to names, as in `nn.Linear`, or the package if that is nothing."""
        whole = set(packages)
        for node in ast.walk(self.syntax[module]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
                whole.discard(node.value.id)
                for line, package in packages[node.value.id]:
                    yield line, self.home(package, node.attr) or package
        for name in whole:
            yield from packages[name]


def dotted(package: str, path: str) -> str:
    parts = [package, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tables(syntax: ast.AST) -> Iterator[tuple[str, str]]:
    """(key, name) of every dictionary of texts and sequences of texts."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Dict):
            for key, names in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(names, ast.Tuple | ast.List):
                    texts = (each.value for each in names.elts if isinstance(each, ast.Constant))
                    yield from ((str(key.value), str(text)) for text in texts)


def imports(syntax: ast.AST, package: str, module: str = "", is_package: bool = False) -> Iterator[Import]:
    """What the source of `module` imports of a package."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    yield node.lineno, alias.name, None, alias.asname or package
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                here = module.split(".")
                above = here[: len(here) - node.level + is_package]
                source = ".".join([*above, *([source] if source else [])])
            if source.split(".")[0] == package:
                for alias in node.names:
                    yield node.lineno, source, alias.name, alias.asname or alias.name


def public(tree: Tree) -> set[str]:
    """Modules of shared rooms that the public names of their packages come from: those in `__all__`."""
    found = set()
    for package in filter(tree.is_package, tree.paths):
        if room(tree, package)[0] == "shared":
            found |= {tree.home(package, name) for name in listed(tree.syntax[package])}
    return {module for module in found if module is not None and room(tree, module)[0] == "shared"}


def listed(syntax: ast.Module) -> Iterator[str]:
    """The names in `__all__`."""
    for node in syntax.body:
        names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        if "__all__" in names and isinstance(value := getattr(node, "value", None), ast.List | ast.Tuple):
            yield from (str(each.value) for each in value.elts if isinstance(each, ast.Constant))


def room(tree: Tree, module: str) -> tuple[str, str]:
    """("system", name), ("roof", name), or ("shared", name) of the room that a module lies in."""
    parts = tree.paths[module].removesuffix(".py").split("/")
    if parts[0] == "systems":
        return ("system", parts[1]) if len(parts) > 2 else ("shared", "systems")
    return ("roof" if parts[0] in ROOFS else "shared"), parts[0]


def reached(tree: Tree, start: Collection[str]) -> set[str]:
    """Modules of shared rooms that are reached from modules of `start`, through shared rooms alone."""
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        for _, target in tree.uses[waiting.pop()]:
            if target not in found and room(tree, target)[0] == "shared":
                found.add(target)
                waiting.append(target)
    return found


def modules_outside(
    tree: Tree, pairs: Collection[tuple[str, str]], at_home: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """System -> modules in shared rooms that belong in its folder.

    A module belongs to the system that reaches it, directly or through shared rooms, if nothing else does: no other
    system, no roof, and no user through the public names of a shared room. What a system and those reach that may
    import it (`pairs`) belongs to the first, since they can get it there: what HCFormer and vision reach is vision's.
    What only two dependants reach stays shared.
    """
    starts: dict[tuple[str, str], list[str]] = {}
    for module in tree.paths:
        starts.setdefault(room(tree, module), []).append(module)
    given = public(tree)
    reachers: dict[str, set[tuple[str, str]]] = {module: {USERS} for module in given | reached(tree, given)}
    for who, modules in starts.items():
        if who[0] != "shared":
            for target in reached(tree, modules):
                reachers.setdefault(target, set()).add(who)
    found: dict[str, list[str]] = {name: [] for kind, name in sorted(starts) if kind == "system"}
    for module, by in sorted(reachers.items()):
        if any(kind != "system" for kind, _ in by):
            continue
        names = {name for _, name in by}
        owner = next((name for name in sorted(names) if all((other, name) in pairs for other in names - {name})), None)
        exempt = at_home.get(owner or "", ())
        place = module.removeprefix(f"{tree.package}.")
        if owner is not None and not any(f"{place}.".startswith(f"{each}.") for each in exempt):
            found[owner].append(module)
    return found


def imports_between_systems(tree: Tree, pairs: Collection[tuple[str, str]]) -> list[dict[str, str]]:
    """Imports from one system to another that are not declared."""
    found = []
    for module, uses in tree.uses.items():
        kind, name = room(tree, module)
        for line, target in uses:
            other_kind, other = room(tree, target)
            if kind == other_kind == "system" and other != name and (name, other) not in pairs:
                found.append({"place": f"{tree.paths[module]}:{line}", "module": target})
    return found


def private_imports(tree: Tree, texts: Mapping[str, str], outside: bool = False) -> list[dict[str, str]]:
    """Imports of underscore modules and names from outside the folder of the package that they lie in.

    `texts` are the tree's own or, with `outside`, files that lie in none of its folders.
    """
    found: dict[tuple[str, str], str] = {}
    for path, text in texts.items():
        module, is_package = "" if outside else dotted(tree.package, path), path.endswith("__init__.py")
        here = module if is_package else module.rpartition(".")[0]
        for line, source, name, _ in imports(ast.parse(text), tree.package, module, is_package):
            parts = [*source.split("."), *([name] if name else [])]
            private = [at for at, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if not private:
                continue
            folder = _folder(tree, parts[: private[0]])
            if not f"{here}.".startswith(f"{folder}."):
                found[f"{path}:{line}", ".".join(parts[: private[0] + 1])] = folder
    return [{"place": place, "name": name, "folder": folder} for (place, name), folder in found.items()]


def _folder(tree: Tree, parts: list[str]) -> str:
    """The package that something in `parts`, a package or a module, lies in."""
    name = ".".join(parts)
    return name if name not in tree.paths or tree.is_package(name) else name.rpartition(".")[0]
