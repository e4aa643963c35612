"""The resolved configuration of every preset of every training: made, read, written and compared."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml

from leafward.cli.train import HOMES
from leafward.config import flatten, to_dict
from leafward.files import write_text

FOLDER = Path(__file__).resolve().parents[1] / "data" / "golden"
PACKAGES = {words.replace("hyperclip --task segment", "segmenter"): home for words, home in HOMES.items()}
SYSTEMS = tuple(sorted(PACKAGES))
HEADER = "# Every setting of every preset. Rewritten by: python tests/golden/write.py\n"


def path_of(system: str) -> Path:
    return FOLDER / "presets" / f"{system}.yaml"


def resolved(system: str) -> dict[str, Any]:
    """Preset -> all its settings as plain mappings, lists, strings and numbers."""
    presets = importlib.import_module(f"{PACKAGES[system]}.config").PRESETS
    return {name: to_dict(preset()) for name, preset in presets.items()}


def recorded(system: str) -> dict[str, Any]:
    """The same as the golden file has it; nothing where there is none."""
    path = path_of(system)
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(system: str, presets: dict[str, Any]) -> None:
    text = HEADER + yaml.safe_dump(presets, sort_keys=False, allow_unicode=True)
    assert yaml.safe_load(text) == presets, f"a preset of {system} does not survive YAML"
    write_text(path_of(system), text)


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every setting that differs, as `preset.setting: old -> new`."""
    before, after = (flatten(presets) if presets else {} for presets in (old, new))
    missing = "nothing"
    return [
        f"{key}: {before.get(key, missing)!r} -> {after.get(key, missing)!r}"
        for key in sorted(before.keys() | after.keys())
        if key not in before or key not in after or _differ(before[key], after[key])
    ]


def _differ(old: Any, new: Any) -> bool:
    """Unequal, or of another type: 1, 1.0 and True are three settings."""
    return old != new or repr(old) != repr(new)
