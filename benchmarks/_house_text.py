"""Lines of source: how many are logic, which functions are long, and which runs stand in two places."""

from __future__ import annotations

import ast
import io
import keyword
import token
import tokenize
from collections.abc import Mapping
from typing import Any

Functions = ast.FunctionDef | ast.AsyncFunctionDef
_LAYOUT = {tokenize.COMMENT, tokenize.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER}
_FSTRINGS = (getattr(token, f"FSTRING_{part}", token.STRING) for part in ("START", "MIDDLE", "END"))  # from 3.12 on
_FOLDED = {token.NAME: "name", token.NUMBER: "number", token.STRING: "text", **dict.fromkeys(_FSTRINGS, "text")}
LEAST_KINDS = 5  # of lines in a window: fewer are a table or a list, not repeated code


def _not_logic(text: str) -> set[int]:
    """Lines of imports and of strings that stand alone: docstrings, also those under a field."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and (isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _is_text(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def logic(text: str) -> dict[int, list[tokenize.TokenInfo]]:
    """Line -> tokens that start on it or, inside a string over several lines, none; without blanks, comments,
    docstrings and imports."""
    skipped, lines = _not_logic(text), text.splitlines()
    found: dict[int, list[tokenize.TokenInfo]] = {}
    for part in tokenize.generate_tokens(io.StringIO(text).readline):
        if part.type in _LAYOUT or part.start[0] in skipped:
            continue
        found.setdefault(part.start[0], []).append(part)
        for line in range(part.start[0] + 1, part.end[0] + 1):
            if lines[line - 1].strip():
                found.setdefault(line, [])
    return dict(sorted(found.items()))


def logic_lines(text: str) -> int:
    return len(logic(text))


def long_functions(text: str, longest: int) -> list[tuple[str, int, int]]:
    """Name, line and length of functions over `longest` lines from `def` to their end, decorators not counted."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, Functions))
    lengths = ((node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions)
    return sorted((each for each in lengths if each[2] > longest), key=lambda each: each[1])


def normalised(text: str) -> list[tuple[int, str]]:
    """Lines of logic with names, texts and numbers folded: (line, what it looks like)."""

    def look(part: tokenize.TokenInfo) -> str:
        return part.string if keyword.iskeyword(part.string) else _FOLDED.get(part.type, part.string)

    return [(line, " ".join(map(look, parts))) for line, parts in logic(text).items()]


def repeats(texts: Mapping[str, str], longest: int) -> list[dict[str, Any]]:
    """Runs of more than `longest` lines of logic that stand in two places but for names, texts and numbers.

    Windows of `longest` + 1 lines are put into a table by what they look like. Those of the same two places, each a
    line further, make a run; of runs that overlap on both sides the longest is taken. Longest first.
    """
    window = longest + 1
    lines = {path: normalised(text) for path, text in texts.items()}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, each in lines.items():
        for start in range(len(each) - longest):
            looks = tuple(look for _, look in each[start : start + window])
            if len(set(looks)) >= LEAST_KINDS:
                places.setdefault(looks, []).append((path, start))
    runs = []
    for files, found in _pairs(places, window).items():
        for *starts, length in _joined(found, window, files[0] == files[1]):
            sides = [(path, lines[path][at : at + length]) for path, at in zip(files, starts, strict=True)]
            ends = [f"{path}:{side[0][0]}-{side[-1][0]}" for path, side in sides]
            runs.append({"lines": length, "places": ends})
    return sorted(runs, key=lambda run: (-run["lines"], run["places"]))


def _pairs(
    places: Mapping[tuple[str, ...], list[tuple[str, int]]], window: int
) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Two files -> pairs of places in them where a window of the same look starts; in one file they lie apart."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for same in places.values():
        for at, (path, start) in enumerate(same):
            for other, second in same[at + 1 :]:
                if path != other or second - start >= window:
                    found.setdefault((path, other), []).append((start, second))
    return found


def _joined(starts: list[tuple[int, int]], window: int, one_file: bool) -> list[tuple[int, int, int]]:
    """Runs as (first start, second start, lines), the longest of those that overlap on both sides.

    In one file a run ends where its copy begins.
    """
    runs: list[tuple[int, int, int]] = []
    for first, second in sorted(starts, key=lambda pair: (pair[1] - pair[0], pair[0])):
        begin, other, length = runs[-1] if runs else (0, 0, 0)
        if length and other - begin == second - first and first <= begin + length:
            most = second - first if one_file else first + window - begin
            runs[-1] = begin, other, min(most, first + window - begin)
        else:
            runs.append((first, second, window))
    kept: list[tuple[int, int, int]] = []
    for run in sorted(runs, key=lambda run: (-run[2], run)):
        if not any(_overlap(run, other) for other in kept):
            kept.append(run)
    return kept


def _overlap(run: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return all(run[side] < other[side] + other[2] and other[side] < run[side] + run[2] for side in (0, 1))
