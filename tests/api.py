"""The public names of the package: all that stands in the `__all__` of a package without an underscore.

python tests/api.py            # writes tests/data/api.txt anew
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import leafward

LIST = Path(__file__).parent / "data" / "api.txt"


def packages() -> list[str]:
    """Every package whose path has no underscore in front of a part, the root first."""
    found = pkgutil.walk_packages(leafward.__path__, "leafward.")
    inside = sorted(
        each.name for each in found if each.ispkg and not any(p.startswith("_") for p in each.name.split("."))
    )
    return ["leafward", *inside]


def names() -> list[str]:
    """package.name of everything public, in order."""
    lines = []
    for package in packages():
        module = importlib.import_module(package)
        lines += [f"{package}.{name}" for name in sorted(getattr(module, "__all__", ()))]
    return lines


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in names()), encoding="utf-8")
    print(f"{LIST}: {len(names())} names")
