"""The counters of `benchmarks/house.py`, on small trees whose answers are known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import house
from _house_graph import Tree, imports_between_systems, modules_outside, private_imports
from _house_text import logic_lines, long_functions, repeats

PAIRS = {("branch", "trunk"), ("leaf", "trunk")}


@pytest.fixture
def write(tmp_path):
    """Writes {path: text} as a package `pkg`, with an `__init__.py` in every folder, and gives its folder."""

    def put(files: dict[str, str]) -> Path:
        root = tmp_path / "pkg"
        for path, text in files.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            for folder in [root, *(root / each for each in Path(path).parents)]:
                (folder / "__init__.py").touch()
        return root

    return put


def outside(root: Path, **at_home: tuple[str, ...]) -> dict[str, list[str]]:
    return modules_outside(Tree.read(root), PAIRS, at_home)


@pytest.mark.parametrize(
    "source",
    [
        "from pkg.room.tool import use",
        "from pkg.room import tool",
        "import pkg.room.tool",
        "import pkg.room as r\nr.tool.use()",
        "from ...room import tool",
        "def run():\n    from pkg.room.tool import use",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.room.tool import use",
        "HOME = 'pkg.room.tool'",
        "from pkg.room.middle import through",
        "from pkg import room\nroom.tool.use()",
        "from pkg.room import passed_on",
        "from pkg import room\nroom.passed_on()",
        "from pkg.room import tabled",
    ],
)
def test_a_module_that_one_system_reaches_belongs_to_it_however_it_is_imported(write, source):
    root = write(
        {
            "room/__init__.py": "from pkg.room.tool import use as passed_on\nHOME = {'tool': ('tabled',)}\n",
            "room/tool.py": "def use(): ...",
            "room/middle.py": "from pkg.room.tool import use as through",
            "systems/branch/train.py": source,
            "systems/other/train.py": "",
        }
    )
    found = outside(root)
    assert "pkg.room.tool" in found["branch"]
    assert found["other"] == []


@pytest.mark.parametrize(
    "files",
    [
        {"systems/other/train.py": "from pkg.room.tool import use"},
        {"systems/other/train.py": "from pkg.shared.middle import through", "shared/middle.py": "import pkg.room.tool"},
        {"cli/train.py": "from pkg.room.tool import use"},
        {"cli.py": "def run():\n    from pkg.room.tool import use"},
        {"explorer/scene.py": "from pkg.room.tool import use"},
    ],
)
def test_what_others_reach_too_is_shared(write, files):
    root = write({"room/tool.py": "", "systems/branch/train.py": "from pkg.room.tool import use"} | files)
    assert "pkg.room.tool" not in outside(root)["branch"]


def test_what_a_package_passes_on_is_not_reached_by_importing_another_name_of_it(write):
    root = write(
        {
            "room/__init__.py": "from pkg.room.one import first\nfrom pkg.room.two import second\n",
            "room/one.py": "first = 1",
            "room/two.py": "second = 2",
            "systems/branch/train.py": "from pkg.room import first",
            "systems/other/train.py": "from pkg.room import second",
            "_moved.py": "MOVED = {'pkg.old': 'pkg.room.one'}",
            "cli/main.py": "from pkg import _moved",
        }
    )
    assert outside(root) == {"branch": ["pkg.room.one"], "other": ["pkg.room.two"]}


@pytest.mark.parametrize(
    ("door", "flagged"),
    [
        ("from pkg.room.tool import use\n", ["below", "tool"]),
        ("from pkg.room.tool import use\n__all__ = ['use']\n", []),
        ("TABLE = {'tool': ('use',)}\n__all__ = ('use',)\n", []),
        ("from pkg.room.below import base\n__all__ = ['base']\n", ["tool"]),
        ("__all__ = ['use']\n", ["below", "tool"]),
    ],
    ids=["not public", "public", "lazy", "another", "nowhere"],
)
def test_what_a_shared_room_lists_as_public_is_reached_by_users(write, door, flagged):
    """And so is what that imports."""
    root = write(
        {
            "room/__init__.py": door,
            "room/tool.py": "from pkg.room.below import base\ndef use(): ...",
            "room/below.py": "base = 1",
            "systems/branch/train.py": "from pkg.room.tool import use",
            "systems/other/train.py": "",
        }
    )
    assert outside(root) == {"branch": [f"pkg.room.{name}" for name in flagged], "other": []}


def test_what_a_system_lists_as_public_is_its_own(write):
    root = write(
        {
            "room/tool.py": "use = 1",
            "systems/branch/__init__.py": "from pkg.room.tool import use\n__all__ = ['use']\n",
            "systems/other/train.py": "",
        }
    )
    assert outside(root)["branch"] == []
    (root / "systems/branch/train.py").write_text("from pkg.systems.branch import use")
    assert outside(root)["branch"] == ["pkg.room.tool"]


def test_what_a_package_itself_uses_is_reached_with_it(write):
    root = write(
        {
            "room/__init__.py": "from pkg.room import one\n\n\ndef both():\n    return one.first\n",
            "room/one.py": "first = 1",
            "systems/branch/train.py": "from pkg.room import both",
            "systems/other/train.py": "",
        }
    )
    assert outside(root)["branch"] == ["pkg.room", "pkg.room.one"]


def test_stubs_of_packages_say_where_names_come_from(write):
    root = write(
        {
            "room/__init__.pyi": "from .one import first",
            "room/one.py": "",
            "systems/branch/train.py": "from pkg.room import first",
        }
    )
    assert outside(root) == {"branch": ["pkg.room.one"]}


def test_a_room_may_be_declared_at_home_where_it_is(write):
    root = write(
        {
            "nn/layer.py": "",
            "nnn/layer.py": "",
            "systems/branch/model.py": "import pkg.nn.layer, pkg.nnn.layer",
            "systems/other/model.py": "",
        }
    )
    assert outside(root)["branch"] == ["pkg.nn.layer", "pkg.nnn.layer"]
    assert outside(root, branch=("nn",))["branch"] == ["pkg.nnn.layer"]
    assert outside(root, other=("nn",))["branch"] == ["pkg.nn.layer", "pkg.nnn.layer"]


def test_of_declared_pairs_the_one_that_is_imported_owns_what_both_reach(write):
    root = write(
        {
            **{f"room/{name}.py": "" for name in ("alone", "with_trunk", "all_three", "two_dependants", "foreign")},
            "systems/branch/train.py": "from pkg.room import alone, with_trunk, all_three, two_dependants",
            "systems/leaf/train.py": "from pkg.room import all_three, two_dependants",
            "systems/trunk/train.py": "from pkg.room import with_trunk, all_three, foreign",
            "systems/other/train.py": "from pkg.room import foreign",
        }
    )
    assert outside(root) == {
        "branch": ["pkg.room.alone"],
        "leaf": [],
        "other": [],
        "trunk": ["pkg.room.all_three", "pkg.room.with_trunk"],
    }


def test_a_system_does_not_reach_what_another_does_for_it(write):
    root = write(
        {
            "room/tool.py": "",
            "systems/trunk/train.py": "from pkg.room import tool",
            "systems/branch/train.py": "from pkg.systems.trunk.train import tool",
        }
    )
    assert outside(root) == {"branch": [], "trunk": ["pkg.room.tool"]}


def test_systems_import_each_other_as_declared_alone(write):
    root = write(
        {
            "systems/trunk/model.py": "def run():\n    from pkg.systems.branch.model import head",
            "systems/branch/model.py": "from pkg.systems.trunk import model\nfrom pkg.systems.branch import train",
            "systems/branch/train.py": "",
            "systems/leaf/model.py": "\nimport pkg.systems.branch.model",
            "cli/main.py": "import pkg.systems.leaf.model",
        }
    )
    assert imports_between_systems(Tree.read(root), PAIRS) == [
        {"place": "systems/leaf/model.py:2", "module": "pkg.systems.branch.model"},
        {"place": "systems/trunk/model.py:2", "module": "pkg.systems.branch.model"},
    ]


def test_private_names_and_modules_stay_in_the_folder_of_their_package(write):
    root = write(
        {
            "_tools.py": "",
            "one/_inner.py": "",
            "one/outer.py": "from pkg.one._inner import a\nfrom pkg import _tools\nfrom pkg.one import __doc__",
            "one/below/deep.py": "from pkg.one import _inner",
            "two/other.py": (
                "from pkg.one._inner import a, b\nfrom pkg.one import _inner\nfrom pkg.one.outer import _a\n"
                "import pkg.one._inner\nimport numpy._core\nfrom ..one import _inner\nfrom .. import _tools"
            ),
        }
    )
    tree = Tree.read(root)
    inner = [f"two/other.py:{line}" for line in (1, 2, 4, 6)]
    assert private_imports(tree, tree.texts) == [
        *({"place": place, "name": "pkg.one._inner", "folder": "pkg.one"} for place in inner[:2]),
        {"place": "two/other.py:3", "name": "pkg.one.outer._a", "folder": "pkg.one"},
        *({"place": place, "name": "pkg.one._inner", "folder": "pkg.one"} for place in inner[2:]),
    ]
    of_tests = {"test_one.py": "from pkg import _tools\nfrom pkg.one.outer import a, _b, _c"}
    assert [use["name"] for use in private_imports(tree, of_tests, outside=True)] == [
        "pkg._tools",
        "pkg.one.outer._b",
        "pkg.one.outer._c",
    ]


def test_logic_is_what_is_left_without_blanks_comments_docstrings_and_imports():
    source = '''"""A module.

Of two paragraphs.
"""

from os import (
    path,
)
import sys

LIMIT = 3  # logic, with a comment
"""What it limits."""


def run(
    x: int,
) -> str:
    """Say."""
    # a comment
    text = """one

    three"""
    import json

    return (
        text
        + str(x)
    )
'''
    # LIMIT; def, x and its end; two lines of the text that are not blank; return, text, + and ).
    assert logic_lines(source) == 10


def function(lines: int, head: str = "def f():") -> str:
    return "\n".join([head, *("    x = 1" for _ in range(lines - 1))])


def test_functions_are_measured_from_def_to_end():
    assert long_functions(f"@decorated\n@twice\n{function(60)}\n\n\ny = 2\n", 60) == []
    assert long_functions(f"@decorated\n{function(61)}\n", 60) == [("f", 2, 61)]
    inner = "\n".join(f"        {line}" for line in function(61, "async def g():").splitlines())
    assert long_functions(f"class C:\n    def m(self):\n{inner}\n", 60) == [("m", 2, 62), ("g", 3, 61)]


BODY = [
    "def {f}({a}, {b}):",
    "    if {a} is None:",
    "        raise ValueError('{t}')",
    "    total = 0",
    "    for {x} in {a}:",
    "        total += {b} * {x}",
    "    while total > 10:",
    "        total -= 1",
    "    with open('{t}') as {f}_file:",
    "        text = {f}_file.read()",
    "    assert text, '{t}'",
    "    print(text)",
    "    return [text, total]",
]


def copy(lines: int, name: str, at: int = 0) -> str:
    words = {key: f"{name}{key}" for key in "fabxt"}
    return "\n".join(line.format(**words) for line in (BODY + BODY)[at : at + lines]) + "\n"


def test_runs_of_over_twelve_lines_are_repeats_whatever_the_names():
    spaced = copy(13, "second").replace("    total = 0", "\n    # why\n    total = 0")
    assert repeats({"a.py": "import os\n" + copy(13, "first"), "b.py": spaced}, 12) == [
        {"lines": 13, "places": ["a.py:2-14", "b.py:1-15"]}
    ]
    assert repeats({"a.py": copy(12, "first"), "b.py": copy(12, "second")}, 12) == []
    other = copy(13, "second").replace("total > 10", "total < 10")
    assert repeats({"a.py": copy(13, "first"), "b.py": other}, 12) == []


def test_windows_that_follow_each_other_are_one_run_and_so_in_one_file():
    longer = "".join((copy(13, name) + "x = [y for y in z]\n" + copy(6, name)) for name in ("one", "two"))
    assert repeats({"a.py": longer}, 12) == [{"lines": 20, "places": ["a.py:1-20", "a.py:21-40"]}]


def test_three_copies_are_three_pairs():
    found = repeats({f"{name}.py": copy(13, name) for name in "abc"}, 12)
    assert [run["places"] for run in found] == [
        ["a.py:1-13", "b.py:1-13"],
        ["a.py:1-13", "c.py:1-13"],
        ["b.py:1-13", "c.py:1-13"],
    ]


def test_tables_are_no_repeats():
    table = "NAMES = [\n" + "    'name',\n" * 40 + "]\n"
    assert repeats({"a.py": table, "b.py": table}, 12) == []


def test_shell_and_rooms_add_up(write):
    two = "a = 1\nb = 2\n"
    root = write(
        {
            "cli/main.py": two,
            "report/page.py": two,
            "engine/experiment.py": two,
            "engine/loop.py": two,
            "systems/branch/config.py": two,
            "systems/branch/train.py": two,
            "systems/branch/model.py": two,
            "errors.py": two,
        }
    )
    found = house.measure(root)
    assert found["logic_lines"] == {"all": 16, ".": 2, "cli": 2, "engine": 4, "report": 2, "systems": 6}
    assert found["shell"] == {"lines": 10, "share": 10 / 16}


def test_check_names_every_place_where_a_limit_is_broken(write):
    program = [sys.executable, str(Path(house.__file__)), "--check", "--root"]
    root = write({"systems/branch/train.py": "from pkg.room.both import x", "room/both.py": "x = 1\n" * 600})
    (root / "cli.py").write_text(f"from pkg.room.both import x\n{function(60)}\n")
    (root / "page.js").write_text("let x;\n" * 600)
    done = subprocess.run([*program, str(root)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["systems"] == {"branch": {"modules_outside": []}}

    (root / "cli.py").write_text(f"from pkg.room import _private\n{function(61)}\n")
    (root / "page.js").write_text("let x;\n" * 601)
    (root / "systems" / "other").mkdir()
    (root / "systems" / "other" / "model.py").write_text("import pkg.systems.branch.train")
    done = subprocess.run([*program, str(root)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "pkg.room.both is reached by branch alone; move it into systems/branch",
        "systems/other/model.py:1 imports pkg.systems.branch.train: systems do not import each other",
        "cli.py:2 f has 61 lines, more than 60",
        "page.js has 601 lines, more than 600",
        "cli.py:1 imports pkg.room._private, which is private to pkg.room",
    ]


def test_the_repository_keeps_its_limits():
    root = Path(house.__file__).resolve().parents[1]
    assert house.broken(house.measure(root / "src" / "leafward", root / "tests")) == []
