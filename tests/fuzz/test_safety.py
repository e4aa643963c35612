"""What the package may not do to a file, whatever the file is: read from the sources themselves."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import leafward
from leafward import files
from leafward.errors import DataError

ROOT = Path(leafward.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
UNPACKERS = {"extractall", "extract", "unpack_archive"}
OWN_FILES = {
    *("report/render.py", "explorer/export.py", "cli/bench.py", "data/samples/__init__.py", "cli/demo_parts/build.py"),
    "engine/lock.py",
}
"""Modules that read files of the package itself, of the kernel, or what they have just written."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the dotted name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> object:
    """The value of a keyword where it is a constant; None where it is not given."""
    given = next((each.value for each in call.keywords if each.arg == name), None)
    return given.value if isinstance(given, ast.Constant) else None


def dangerous(tree: ast.AST) -> Iterator[str]:
    """What a module does that can run code from a file, or write where an archive says."""
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"import {name}" for name in names if name.partition(".")[0] in PICKLES)
    for name, call in calls(tree):
        last = name.rpartition(".")[2]
        if name in ("torch.load", "load_state_dict_from_url") and keyword(call, "weights_only") is not True:
            yield ast.unparse(call)
        if name in ("np.load", "numpy.load") and keyword(call, "allow_pickle") is not False:
            yield ast.unparse(call)
        if last in ("eval", "exec") and name in ("eval", "exec"):
            yield ast.unparse(call)
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
            loader = next((ast.unparse(each.value) for each in call.keywords if each.arg == "Loader"), "")
            if loader not in ("yaml.SafeLoader", "_dialect()[0]"):  # the latter is derived from it, see below
                yield ast.unparse(call)
        if last in UNPACKERS and "shutil" not in name and "re." not in name:
            yield ast.unparse(call)
        if ".Auto" in f".{name}" and last == "from_pretrained" and keyword(call, "trust_remote_code") is not False:
            yield ast.unparse(call)  # without an answer transformers asks at the terminal
        if keyword(call, "trust_remote_code") is True or keyword(call, "shell") is True:
            yield ast.unparse(call)


@pytest.mark.parametrize("name", SOURCES)
def test_no_module_can_run_what_a_file_holds(name):
    assert list(dangerous(SOURCES[name])) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "import joblib.memory",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "archive.extractall(folder)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "library.AutoTokenizer.from_pretrained(name)",
    ],
)
def test_the_check_itself_sees_what_it_looks_for(text):
    assert list(dangerous(ast.parse(text)))


def test_the_loader_of_configurations_is_a_safe_one():
    import yaml

    from leafward.config import _dialect

    assert issubclass(_dialect()[0], yaml.SafeLoader)


def test_the_code_of_a_folder_never_runs_and_nobody_is_asked(tmp_path):
    """Not even where somebody types yes: the tokenizer and the model of a folder that brings code of its own."""
    marker = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    card = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(card))
    (folder / "tokenizer.json").write_text("{}")
    program = f"""
from leafward.encoders import load_encoder
from leafward.errors import LeafwardError
from leafward.data.text import load_tokenizer
for load in (load_tokenizer, load_encoder):
    try:
        load({str(folder)!r})
    except LeafwardError as error:
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], input="y\n" * 9, capture_output=True, text=True)
    assert done.stdout == "refused\nrefused\n", done.stdout + done.stderr
    assert not marker.exists()


def test_models_are_never_loaded_from_pickles():
    """transformers takes pytorch_model.bin unless it is told not to."""
    for name, tree in SOURCES.items():
        for called, call in calls(tree):
            if "Model" in called and called.endswith(".from_pretrained"):
                assert keyword(call, "use_safetensors") is True, f"{name}: {ast.unparse(call)}"


def test_files_of_users_are_read_where_their_size_is_checked():
    """`leafward.files` is the one place that reads a whole file; the others ask it."""
    found = [
        f"{name}: {ast.unparse(call)}"
        for name, tree in SOURCES.items()
        if name not in {"files.py", *OWN_FILES}
        for called, call in calls(tree)
        if called.rpartition(".")[2] in ("read_text", "read_bytes") and "." in called
        if not called.startswith(("readers.", "files."))
    ]
    assert found == []


def test_sizes_are_looked_at_before_reading(tmp_path, monkeypatch):
    path = tmp_path / "large.json"
    path.write_text("[1, 2, 3]")
    monkeypatch.setattr(Path, "read_bytes", None)  # no byte may be read
    with pytest.raises(DataError, match=r"large\.json: it has 9 bytes, and at most 4 are read"):
        files.read_text(path, most=4)
    monkeypatch.setattr(files, "LARGEST_RECORD", 4)
    with pytest.raises(DataError, match="at most 4"):
        files.read_json(path)


def test_what_leads_out_of_a_folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "secret").write_text("")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to("..")
    for name in ("link", "up/secret", "../secret", "/etc/passwd", "below/../../secret"):
        with pytest.raises(DataError, match="leads out of the folder"):
            files.inside(folder, name)
    (folder / "own").symlink_to(folder / "below")
    for name in ("below", "own", "below/../below", "not-there"):
        assert files.inside(folder, name) == folder / name
    (tmp_path / "also").symlink_to(folder)  # the folder itself may be a link
    assert files.inside(tmp_path / "also", "below") == tmp_path / "also" / "below"
