"""An installation with one extra alone, or none: everything is listed, and what is missing is said by the extra's name.

The packages of the other extras are hidden from fresh processes, as if they had not been installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leafward.cli.commands import COMMANDS
from leafward.cli.list import FAMILIES, NEEDS, PARTLY
from leafward.errors import EXTRAS

OTHERS = ("starlette", "tensorboard", "geoopt", "hypll", "gensim", "nltk", "onnx", "onnxruntime", "pandas", "sklearn")
"""What only extras or the tools of developers bring beside their own packages."""
CORE = ("PIL",)
"""A package of an extra that the core has as well, through matplotlib."""

PROCESS = """
import contextlib, importlib.abc, io, json, os, sys
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
hidden, lines = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hiding())
import importlib.util  # which only asks, and must hear of no such package
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in hidden else found(name, *rest)
from leafward.cli.dispatch import main

said = []
for words in lines:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code or 0
    said.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""


def run(extra: str | None, lines: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of command lines in one process that has the core and one extra."""
    own = {*CORE, *(EXTRAS[extra] if extra else ())}
    hidden = sorted({name for names in EXTRAS.values() for name in names} - own | set(OTHERS) - _brought(extra))
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, json.dumps(hidden), json.dumps(lines)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [(status, out, err) for status, out, err in json.loads(done.stdout.splitlines()[-1])]


def _brought(extra: str | None) -> set[str]:
    """Packages of `OTHERS` that come with an extra."""
    return {"serve": {"starlette"}, "lm": {"pandas", "sklearn"}}.get(extra or "", set())


SMOKE: dict[str, tuple[tuple[str, ...], list[str]]] = {
    # what it stands for in `leafward list` -> what must be there, and a command line
    "evaluate --task hierarchy": ((), ["evaluate", "p.csv", "--task", "hierarchy", "--taxonomy", "t.csv"]),
    "train taxonomy": (
        (),
        ["train", "taxonomy", "--data", "t.csv", "--dim", "2", "--epochs", "1", "--device", "cpu", "--out", "run"],
    ),
    "data chains": ((), ["data", "chains", "--taxonomy", "t.csv", "--out", "c.jsonl"]),
    "audit": ((), ["audit", "m.npy", "--out", "audit"]),
    "report": ((), ["report", "run", "--out", "page.html"]),
    "explore --export": ((), ["explore", "t.csv", "--export", "tree.html"]),
    "completion": ((), ["completion", "bash"]),
    "data index": (("search",), ["data", "index", "m.npy", "--out", "index"]),
    "data tokenise": (("lm",), ["data", "tokenise", "--data", "text.txt", "--cache", "cache"]),
    "explain --system hcformer": (("vision",), ["explain", "hcformer_nano", "photo.png", "--out", "drawn"]),
}
REFUSED: dict[str, tuple[str, list[str]]] = {
    # what is only tried where the extra is missing, as it would take long or never end
    "train helm": ("lm", ["train", "helm", "--data", "text.txt", "--loop.device", "cpu", "--out", "helm"]),
    "train radial": (
        "lm",
        ["train", "radial", "--model", "encoder", "--data", "c.jsonl", "--device", "cpu", "--out", "radial"],
    ),
    "train hcformer": (
        "vision",
        ["train", "hcformer", "--data", "photos", "--loop.device", "cpu", "--out", "hcformer"],
    ),
    "train himapper": (
        "vision",
        ["train", "himapper", "--data", "photos", "--backbone", "timm:resnet10t", "--out", "himapper"],
    ),
    "explore": ("serve", ["explore", "t.csv", "--no-open"]),
    "ray": (
        "cluster",
        ["train", "superposition", "--executor", "ray", "--workers", "1", "--device", "cpu", "--out", "sweep"],
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something of everything that the commands read."""
    import numpy as np
    from PIL import Image

    (tmp_path / "t.csv").write_text("dog,animal\ncat,animal\npoodle,dog\ncorgi,dog\n")
    (tmp_path / "p.csv").write_text("true,predicted\npoodle,corgi\ncat,cat\n")
    (tmp_path / "text.txt").write_text("Beautiful is better than ugly.\n" * 20)
    np.save(tmp_path / "m.npy", np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32))
    for name in ("photo.png", "photos/a/0.png", "photos/a/1.png", "photos/b/0.png", "photos/b/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 96), (40, 90, 160)).save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_one_extra_alone(extra: str | None, folder: Path) -> None:
    missing = {each for each in EXTRAS if each != extra}
    tried = [(words, needs) for needs, words in SMOKE.values() if needs or extra is None]
    tried += [(words, (needs,)) for needs, words in REFUSED.values() if needs in missing]
    listed, *found = run(extra, [["list", "--json"], *(words for words, _ in tried)], folder)
    assert listed[0] == 0, listed
    said = json.loads(listed[1].splitlines()[-1])
    # An extra may bring all that another one is made of (vision has what serve needs of pictures), never the reverse.
    assert all(bool(said["missing"][each]) == (each in missing) for each in EXTRAS)
    for name, state in said["available"].items():
        wanted = [each for each in NEEDS.get(name, ()) if each in missing]
        part, extras = PARTLY.get(name, ("", ()))
        more = [each for each in extras if each in missing]
        partly = f"yes {part}; otherwise install leafward[{','.join(more)}]" if more else "yes"
        assert state == (f"install leafward[{','.join(wanted)}]" if wanted else partly)
    for (words, needs), (status, _, err) in zip(tried, found, strict=True):
        absent = [each for each in needs if each in missing]
        if absent:
            assert status == 1, (words, err)
            assert f"leafward[{absent[0]}]" in err, (words, err)
            assert "Traceback" not in err
            assert "unexpected" not in err
        else:
            assert status == 0, (words, err)


def test_the_demo_names_all_that_it_lacks_before_it_begins(tmp_path: Path) -> None:
    ((status, _, err),) = run(None, [["demo"]], tmp_path)
    assert (status, list(tmp_path.iterdir())) == (1, [])
    assert "(transformers, timm)" in err
    assert "pip install 'leafward[lm,vision]'" in err
    assert "--only measure" in err


def test_help_needs_no_extra(tmp_path: Path) -> None:
    lines = [["--help"], *([name, "--help"] for name in COMMANDS)]
    lines += [["train", name, "--help"] for name in FAMILIES["train"]]
    lines += [["data", name, "--help"] for name in FAMILIES["data"]]
    lines += [["evaluate", "--task", name, "--help"] for name in FAMILIES["evaluate --task"]]
    for words, (status, out, err) in zip(lines, run(None, lines, tmp_path), strict=True):
        assert status == 0, (words, err)
        assert out.strip(), words


def test_what_is_said_to_need_an_extra_is_there() -> None:
    known = {f"{command} {name}" for command, table in FAMILIES.items() for name in table} | set(COMMANDS)
    assert {*NEEDS, *PARTLY} <= known
    assert not set(NEEDS) & set(PARTLY)
    assert {extra for needs in (*NEEDS.values(), *(more for _, more in PARTLY.values())) for extra in needs} <= set(
        EXTRAS
    )
