"""The documents: links lead somewhere, named tests exist, commands are known, and nothing is left out."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from leafward import _moved
from leafward.cli import bench
from leafward.cli.commands import COMMANDS
from leafward.cli.train import CONFIGS, chosen
from leafward.config import is_settings, short_names
from leafward.systems import EVALUATIONS, EXPLANATIONS, PREPARATIONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
DOCUMENTED = re.compile(r"^::: ([\w.]+)$", flags=re.MULTILINE)
NAMED_TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")
#: what only the command line uses: its help is its reference
BEHIND_COMMANDS = {"cli", "explorer"}
FAMILIES = {"train": CONFIGS, "data": PREPARATIONS}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of `text`, as part of `page`, to files or headings that are not there."""
    prose = INLINE.sub("", FENCE.sub("", text))
    broken = []
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue  # another site
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `leafward …` in code blocks and inline code; what stands in brackets belongs to them."""
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *INLINE.findall(FENCE.sub("", text))]:
        if line.startswith("leafward "):
            lexer = shlex.shlex(re.sub(r"[\[\]…]", " ", line), posix=True, punctuation_chars=False)
            lexer.whitespace_split, lexer.quotes = True, '"'
            yield list(lexer)[1:]


def value_of(words: list[str], flag: str) -> str | None:
    """The word after a flag; None where there is none, or a placeholder in capitals."""
    value = next((after for word, after in itertools.pairwise(words) if word == flag), None)
    return None if value is None or value.isupper() else value


def unknown(words: list[str]) -> str | None:
    """What this package does not know of a command, or None."""
    if tuple(words) in _moved.COMMANDS:
        return None  # docs/moving.md says what they are now
    command, first = words[0], words[1] if len(words) > 1 else "-"
    if command.startswith("-"):
        return None  # --help, --version
    if command not in COMMANDS:
        return command
    placeholder = first.startswith("-") or first.isupper()
    if command in FAMILIES and not placeholder and first not in FAMILIES[command]:
        return first
    if command == "bench" and not placeholder and first not in bench.names():
        return first
    task, preset = value_of(words, "--task"), value_of(words, "--preset")
    if command == "evaluate" and task is not None and task not in EVALUATIONS:
        return task
    if command == "train" and preset is not None:
        presets = importlib.import_module(CONFIGS[chosen(words[1:])[0]]).PRESETS
        return next((name for name in preset.split("|") if name not in presets), None)
    return None


def flags(cls: type, prefix: str = "") -> set[str]:
    """The flags of a dataclass or of settings, nested ones with a dot, switches with `no-`; and their short ones."""
    found: set[str] = set()
    if is_settings(cls) and not prefix:
        short = {name.replace("_", "-") for name in short_names(cls)}
        found |= short | {f"no-{name}" for name in short}
    hints = typing.get_type_hints(cls)
    for field in getattr(cls, "__struct_fields__", hints):
        kind = hints[field]
        name = prefix + field.replace("_", "-")
        found |= {name, f"{prefix}no-{field.replace('_', '-')}"} if kind is bool else {name}
        if dataclasses.is_dataclass(kind) or is_settings(kind):
            found |= flags(typing.cast(type, kind), f"{name}.")
    return found


@functools.cache
def known_flags(command: str, family: str) -> frozenset[str]:
    """All flags of a command; of those that are families, of the module that was chosen, or of any of them."""
    table = {"train": CONFIGS, "evaluate": EVALUATIONS, "explain": EXPLANATIONS, "data": PREPARATIONS}.get(command)
    if table is None:
        return frozenset(flags(importlib.import_module(f"leafward.cli.{command}").Args))
    modules = [importlib.import_module(table[name]) for name in ([family] if family in table else table)]
    shared = {"train": {"preset", "config", "out", "resume", "overwrite", "task"}, "evaluate": {"task"}}
    shared["explain"] = {"system"}
    own = [flags(module.Config if command == "train" else module.Args) for module in modules]
    return frozenset(shared.get(command, set()).union(*own))


def unknown_options(words: list[str]) -> list[str]:
    """Options of a command that it does not have; those of benchmarks belong to their own files."""
    command = words[0]
    if command not in COMMANDS or command in ("bench", "completion"):
        return []
    family = value_of(words, "--task") if command == "evaluate" else next(iter(words[1:]), None)
    if command == "train" and family in CONFIGS:
        family = chosen(words[1:])[0]
    given = [word.partition("=")[0].removeprefix("--") for word in words if re.match(r"--[a-z]", word)]
    known = known_flags(command, family or "") | {"json", "debug", "help", "help-all"}
    return [name for name in given if name.rstrip(".") not in known]


def benchmark_commands(text: str) -> Iterator[list[str]]:
    """Name and words of every benchmark that is run: `leafward bench NAME …`, `python benchmarks/NAME.py …`."""
    text = re.sub(r"\bpython benchmarks/(\w+)\.py", r"leafward bench \1", text)
    yield from (words[1:] for words in commands(text) if words[0] == "bench" and len(words) > 1)


@functools.cache
def benchmark_flags(name: str) -> dict[str, bool]:
    """The flags of a benchmark, its own and those of the modules `_…` beside it that it imports; whether required."""
    folder = ROOT / "benchmarks"
    tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("_") and node.module != "__future__":
            found |= benchmark_flags(node.module or "")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            required = any(word.arg == "required" for word in node.keywords)
            found |= {str(flag.value): required for flag in node.args if isinstance(flag, ast.Constant)}
    return found


def wrong_options(words: list[str]) -> list[str]:
    """Options that a benchmark does not have or, where it is given any, must have and has not."""
    flags, given = benchmark_flags(words[0]), [word for word in words[1:] if word.startswith("--")]
    needed = [flag for flag, required in flags.items() if required and given]
    return [flag for flag in given if flag not in flags] + [flag for flag in needed if flag not in given]


@functools.cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text(encoding="utf-8"))


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs" / "conventions.md"
    text = "[a](helm.md) [b](#accuracy) [c](../README.md#curved-spaces) [d](https://x.org) `[e](no.md)`"
    assert not broken_links(page, text)
    assert broken_links(page, "[a](hlem.md) [b](#acuracy) [c](helm.md#accuracy)") == [
        "hlem.md",
        "#acuracy",
        "helm.md#accuracy",
    ]


@every_page
def test_commands_are_known(page: Path) -> None:
    wrong = {" ".join(words): unknown(words) for words in commands(page.read_text(encoding="utf-8"))}
    assert not {command: word for command, word in wrong.items() if word is not None}


@every_page
def test_options_are_known(page: Path) -> None:
    found = {" ".join(words): unknown_options(words) for words in commands(page.read_text(encoding="utf-8"))}
    assert not {command: options for command, options in found.items() if options}


@every_page
def test_options_of_benchmarks_are_known(page: Path) -> None:
    found = {" ".join(words): wrong_options(words) for words in benchmark_commands(page.read_text(encoding="utf-8"))}
    assert not {command: options for command, options in found.items() if options}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("leafward bench audit --rows 8 --hight 2", ["--hight"]),
        ("python benchmarks/radial_evidence.py --model M --data D --seeds 3", []),
        ("python benchmarks/radial_evidence.py --seeds 3", ["--model", "--data"]),
        ("python benchmarks/radial_evidence.py", []),  # the script is named, not run
    ],
)
def test_a_wrong_option_of_a_benchmark_is_found(line: str, options: list[str]) -> None:
    assert [wrong_options(words) for words in benchmark_commands(f"see `{line}`.")] == [options]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("leafward train helm --data x --loop.steps 5 --twin", []),
        ("leafward train helm --data x --loop.step 5 --twins", ["loop.step", "twins"]),
        ("leafward evaluate RUN --task search --like x --kk 3", ["kk"]),
        ("leafward evaluate RUN --like x", []),  # a flag of one of the tasks
        ("leafward data chains --taxonomie t.csv", ["taxonomie"]),
        ("leafward train hcformer --no-check --augment.mixup 0.2", []),
        ("leafward audit X --json --fold-norm --qual", ["qual"]),
    ],
)
def test_an_unknown_option_is_found(line: str, options: list[str]) -> None:
    assert [unknown_options(words) for words in commands(f"```\n{line}\n```\n")] == [options]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("leafward trian helm", "trian"),
        ("leafward train hlem", "hlem"),
        ("leafward train radial --preset authors|sentance", "sentance"),
        ("leafward data toknise", "toknise"),
        ("leafward bench helm", "helm"),
        ("leafward evaluate RUN [--task serch]", "serch"),
        ('leafward evaluate RUN --task search --like "it\'s"', None),
        ("leafward train RECIPE --preset NAME", None),
    ],
)
def test_an_unknown_command_is_found(line: str, word: str | None) -> None:
    assert [unknown(words) for words in commands(f"```\n{line}\n```\n")] == [word]
    assert [unknown(words) for words in commands(f"see `{line}`.")] == [word]


@every_page
def test_named_tests_exist(page: Path) -> None:
    missing = []
    for named in NAMED_TEST.findall(page.read_text(encoding="utf-8")):
        path, _, name = named.partition("::")
        if not (ROOT / path).is_file() or (name and name not in functions(ROOT / path)):
            missing.append(named)
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: str | list | dict) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(part)

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = (page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed) == sorted(str(page) for page in written if page.parts[0] != "changes")


def test_every_public_package_is_in_the_api_reference() -> None:
    """Each package of the house, and each system that exports names; what is documented is there."""
    source = ROOT / "src" / "leafward"
    packages = {folder.parent.name for folder in source.glob("*/__init__.py")} - BEHIND_COMMANDS
    names = {f"leafward.{package}" for package in packages}
    exporting = {
        path.parent.name for path in source.glob("systems/*/__init__.py") if "__all__" in path.read_text("utf-8")
    }
    names |= {f"leafward.systems.{system}" for system in exporting}
    documented = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    assert len(packages) >= 10
    assert not names - set(DOCUMENTED.findall(documented))
    for name in DOCUMENTED.findall(documented):
        assert importlib.util.find_spec(name) is not None, name


def test_there_is_something_to_check() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(list(commands(text))) > 50
    assert len(LINK.findall(text)) > 20
    assert len(NAMED_TEST.findall(text)) > 50
