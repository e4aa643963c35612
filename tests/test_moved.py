"""Old import paths and command names: each works, warns and says what it is called now."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from leafward import _moved
from leafward.cli.dispatch import main

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = [name for name, homes in _moved.MODULES.items() if homes]


@pytest.mark.parametrize("old", PUBLIC)
def test_an_old_module_has_the_public_names_of_the_new_ones_and_warns(old):
    homes = [importlib.import_module(f"leafward.{home}") for home in _moved.MODULES[old]]
    sys.modules.pop(f"leafward.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"leafward\.{old} is now leafward\.{_moved.MODULES[old][0]}"):
        module = importlib.import_module(f"leafward.{old}")
    for home in homes:
        names = getattr(home, "__all__", [name for name in vars(home) if not name.startswith("_")])
        for name in names:
            if isinstance(getattr(home, name), ModuleType):
                continue  # what it imports, and its own modules, which have lines of their own
            first = next(each for each in homes if hasattr(each, name))
            assert getattr(module, name) is getattr(first, name)
    with pytest.raises(AttributeError):
        _ = module.never_there


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in _moved.NAMES.items() for n in names])
def test_a_name_that_left_a_package_is_found_and_warns(package, name):
    with pytest.warns(DeprecationWarning, match=rf"leafward\.{package}\.{name} is now"):
        found = getattr(importlib.import_module(f"leafward.{package}"), name)
    home, now = _moved.name_today(package, name)
    assert found is getattr(importlib.import_module(f"leafward.{home}"), now)


@pytest.mark.parametrize("old", _moved.RENAMED)
def test_an_old_name_in_an_old_module_is_what_it_is_called_now(old):
    (module, name), (home, new) = (path.rsplit(".", 1) for path in (old, _moved.RENAMED[old]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = importlib.import_module(f"leafward.{module}")
    with pytest.warns(DeprecationWarning, match=rf"leafward\.{old} is now leafward\.{_moved.RENAMED[old]}"):
        found = getattr(moved, name)
    assert found is getattr(importlib.import_module(f"leafward.{home}"), new)


def test_imports_as_users_have_written_them():
    program = """
import warnings
warnings.simplefilter("ignore")
from leafward.models import HCFormer, HelmConfig, HiMapper
from leafward.models.helm import HelmForCausalLM
from leafward.tasks import fewshot
from leafward.tasks.language import prepare, LanguageTask
from leafward.adapters import LatentHierarchyConfig, attach
import leafward.superposition.matrix_files, leafward.scaling as scaling
from leafward.recipes import helm
from leafward.data import embedded
from leafward.cli import entry
print(HelmForCausalLM.__module__, fewshot.few_shot.__module__, helm.Config.__module__, helm.run.__self__.__module__)
print(scaling.fit_power_law.__module__, embedded("clothing.csv").is_file())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [
        "leafward.systems.helm.model",
        "leafward.data.fewshot",
        "leafward.systems.helm.config",
        "leafward.systems.helm.train",
        "leafward.stats.power_laws.laws",
        "True",
    ], done.stderr


def test_nothing_of_ours_uses_an_old_name():
    """Every module of the package can be imported with the warning turned into an error."""
    program = """
import importlib, pkgutil, warnings
warnings.filterwarnings("error", message="leafward.* is now", category=DeprecationWarning)
import leafward
for each in pkgutil.walk_packages(leafward.__path__, "leafward."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_old_command_runs_in_its_new_words(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "segmenter", "--help"])
    shown = capsys.readouterr()
    assert stopped.value.code == 0
    assert "leafward train hyperclip --task segment" in shown.out
    assert shown.err == "leafward: train segmenter is now: leafward train hyperclip --task segment\n"


def test_other_modules_are_still_missing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("leafward.tasks.never_there")


def test_the_page_is_what_the_tables_say():
    assert (ROOT / "docs" / "moving.md").read_text(encoding="utf-8") == _moved.page()
