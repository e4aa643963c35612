"""What every part shares: names that are imported on first use, errors, and writing without halves."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import leafward
from leafward.errors import LeafwardError, nearest
from leafward.files import check_writable

LAZY = ["leafward.engine", "leafward.report", "leafward.stats.power_laws", "leafward.systems.superposition"]


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_of_a_lazy_package_is_there(name):
    package = importlib.import_module(name)
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, each) is getattr(package, each) for each in package.__all__)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_importing_the_lazy_packages_costs_nothing():
    code = f"import sys, {', '.join(LAZY)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "scipy", "matplotlib", "jinja2"} & set(loaded)


def test_a_long_list_of_names_is_cut():
    names = [f"name{k:03d}" for k in range(100)]
    assert nearest("name0005", names) == "did you mean 'name005'?"
    assert nearest("zzz", names).endswith("name015 and 84 more")
    assert nearest("zzz", ["b", "a"]) == "allowed: a, b"
    assert nearest(None, ["b", "a"]) == "allowed: a, b"
    assert nearest("zzz", []) == "allowed: nothing"


def test_a_folder_that_cannot_be_written_is_refused_beforehand(tmp_path, monkeypatch):
    check_writable(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(LeafwardError, match="file is not a folder"):
        check_writable(tmp_path / "file" / "deep")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # for root every folder is writable
    with pytest.raises(LeafwardError, match="may not be written to"):
        check_writable(tmp_path / "new")


def test_registering_is_a_call_and_not_what_an_import_does():
    code = """
import sys, timm, transformers
import leafward, leafward.systems
assert not timm.is_model("hcformer_nano")
leafward.register("timm")
leafward.register("timm")
assert timm.is_model("hcformer_nano") and "leafward.systems.helm.model" not in sys.modules
leafward.register()
assert transformers.AutoConfig.for_model("helm").model_type == "helm"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(LeafwardError, match="did you mean 'timm'"):
        leafward.register("tim")


def test_the_door_has_its_names_and_models_register_themselves():
    code = """
import sys, leafward
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
assert set(leafward.__all__) <= set(dir(leafward))
import timm, transformers
from leafward import HCFormer, HelmForCausalLM
assert transformers.AutoConfig.for_model("helm").model_type == "helm" and timm.is_model("hcformer_nano")
assert all(getattr(leafward, name) is not None for name in leafward.__all__)
leafward.audit
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="module 'leafward' has no attribute 'audits'"):
        _ = leafward.audits
