"""How well the package keeps its house rules: where systems live, how long things are, what is repeated.

    python benchmarks/house.py                  # one JSON object
    python benchmarks/house.py --check          # status 1, and a sentence for each limit that is broken

Read from the source alone: nothing of the package is imported. Limits: no module that one system alone reaches lies
outside its folder; no system imports another but for the declared pairs; no function has more than 60 lines, no file
more than 600; no underscore name is imported from outside its package's folder.

Users reach things too: the public names of a shared room, those that the `__init__` of one of its packages lists in
`__all__`. The modules that these come from, and what those import, are shared though one system alone may use them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from _house_graph import Tree, imports_between_systems, modules_outside, private_imports
from _house_text import logic_lines, long_functions, repeats

ROOT = Path(__file__).resolve().parent.parent
PAIRS = {("himapper", "vision"), ("hcformer", "vision")}
"""(system, system that it may import)."""
AT_HOME = {"helm": ("nn",)}
"""Shared rooms, or modules of them, that one system may be the only one to reach: `nn` is a library of layers for
sequence models that stands for itself, and HELM is the one sequence model here."""
LONGEST_FUNCTION, LONGEST_FILE, LONGEST_REPEAT = 60, 600, 12
SHELL = (
    *("cli.py", "cli/**/*.py", "report/**/*.py", "engine/experiment.py"),
    *(f"systems/*/{name}.py" for name in ("config", "train", "evaluate")),
)
"""What stands between a user and the mathematics."""


def measure(root: Path, tests: Path | None = None) -> dict[str, Any]:
    """All counts of the package at `root`, a folder with an `__init__.py`; systems are folders of its `systems`."""
    tree = Tree.read(root)
    logic = {path: logic_lines(text) for path, text in tree.texts.items()}
    rooms: Counter[str] = Counter()
    for path, lines in logic.items():
        rooms[path.split("/")[0] if "/" in path else "."] += lines
    total, shell = sum(logic.values()), sum(logic.get(path, 0) for path in matching(root, SHELL))
    systems, between = modules_outside(tree, PAIRS, AT_HOME), imports_between_systems(tree, PAIRS)
    return {
        "systems": {name: {"modules_outside": outside} for name, outside in systems.items()},
        "imports_between_systems": between,
        "long_functions": [
            {"place": f"{path}:{line}", "function": name, "lines": lines}
            for path, text in tree.texts.items()
            for name, line, lines in long_functions(text, LONGEST_FUNCTION)
        ],
        "long_files": [
            {"place": path, "lines": lines}
            for path in matching(root, ("**/*.py", "**/*.js"))
            if (lines := len((root / path).read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
        ],
        "private_imports": private_imports(tree, tree.texts),
        "private_imports_of_tests": None if tests is None else len(private_imports(tree, python_files(tests), True)),
        "logic_lines": {"all": total, **dict(sorted(rooms.items()))},
        "shell": {"lines": shell, "share": shell / max(1, total)},
        "repeats": repeats(tree.texts, LONGEST_REPEAT),
    }


def matching(root: Path, patterns: tuple[str, ...]) -> list[str]:
    """Files below `root` that match one of the patterns, in order, as paths from there."""
    return sorted({path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)})


def python_files(folder: Path) -> dict[str, str]:
    return {path: (folder / path).read_text(encoding="utf-8") for path in matching(folder, ("**/*.py",))}


def broken(found: dict[str, Any]) -> list[str]:
    """A sentence for each limit that is broken, one for each place."""
    return [
        *(
            f"{module} is reached by {system} alone; move it into systems/{system}"
            for system, counts in found["systems"].items()
            for module in counts["modules_outside"]
        ),
        *(
            f"{use['place']} imports {use['module']}: systems do not import each other"
            for use in found["imports_between_systems"]
        ),
        *(
            f"{function['place']} {function['function']} has {function['lines']} lines, more than {LONGEST_FUNCTION}"
            for function in found["long_functions"]
        ),
        *(f"{file['place']} has {file['lines']} lines, more than {LONGEST_FILE}" for file in found["long_files"]),
        *(
            f"{use['place']} imports {use['name']}, which is private to {use['folder']}"
            for use in found["private_imports"]
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT / "src" / "leafward", help="folder of the package")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="folder of its tests")
    parser.add_argument("--check", action="store_true", help="status 1 where a limit is broken")
    arguments = parser.parse_args()
    found = measure(arguments.root, arguments.tests)
    print(json.dumps(found, indent=2))
    if arguments.check and (sentences := broken(found)):
        sys.exit("\n".join(sentences))


if __name__ == "__main__":
    main()
