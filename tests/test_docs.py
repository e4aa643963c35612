"""The documents: links lead somewhere, named tests exist, and commands are commands of this package."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from leafward.commands import COMMANDS, bench
from leafward.commands.train import load_recipe
from leafward.recipes import EVALUATIONS, PREPARATIONS, RECIPES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```.*?\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)?")
FAMILIES = {"train": RECIPES, "data": PREPARATIONS}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


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
        return next((name for name in preset.split("|") if name not in load_recipe(first).PRESETS), None)
    return None


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


def test_there_is_something_to_check() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(list(commands(text))) > 50
    assert len(LINK.findall(text)) > 20
    assert len(NAMED_TEST.findall(text)) > 50
