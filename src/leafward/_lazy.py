"""Packages whose names are imported when they are first used (PEP 562), so that importing them costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leafward._moved import moved_name
from leafward.errors import LeafwardError, missing_extra


def lazy(package: str, home: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package`, from its submodules to the public names that live in each."""
    module_of = {name: module for module, names in home.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            return moved_name(package, name)
        try:
            value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        except ImportError as error:
            if (wanted := missing_extra(error)) is None:
                raise
            raise LeafwardError(wanted) from error
        setattr(sys.modules[package], name, value)  # the next use does not come here again
        return value

    return get, lambda: sorted(module_of)
