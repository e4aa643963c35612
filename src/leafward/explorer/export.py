"""The scene as one HTML file that needs no server: page, modules and data in it, and nothing it may load.

The page's modules become one script, each in a function of its own, in the order of their imports. They may use
``import { a, b as c } from "./m.js";``, ``import * as m from "./m.js";`` and ``export`` before a function, class or
const; anything else is refused here rather than broken in the browser.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch

from leafward.errors import LeafwardError
from leafward.explorer.scene import Scene, View, little, to_json
from leafward.files import write_text

#: Points up to which all neighbours are worked out and put into the file.
MOST_TABLE_POINTS = 50_000
#: Entries of a block of inner products.
BLOCK = 1 << 23
#: Bytes of thumbnails in the file.
MOST_THUMBNAILS = 32 << 20
STYLE, SCRIPT = (
    '<link rel="stylesheet" href="./page/style.css">',
    '<script type="module" src="./page/app.js"></script>',
)
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_IMPORT = re.compile(r'^import\s+(?:\{([^}]*)\}|\*\s+as\s+(\w+))\s+from\s+"\./([\w-]+\.js)";[ \t]*$', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+(?=(?:async\s+)?(?:function\s*\*?|class|const)\s+(\w+))", re.MULTILINE)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*$|\bimport\s*\(|\bimport\.meta\b", re.MULTILINE)


def page_files() -> dict[str, bytes]:
    """The files of the page by name, as they are installed with the package."""
    folder = resources.files("leafward.explorer") / "page"
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return {entry.name: entry.read_bytes() for entry in entries if Path(entry.name).suffix in KINDS}


def write_page(scene: Scene, path: str | Path, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write the scene as one HTML file, in one step; `progress` is told the share that is done."""
    write_text(path, static_page(scene, progress))


def static_page(scene: Scene, progress: Callable[[float], None] = lambda share: None) -> str:
    """The scene as the text of one HTML file."""
    files = {name: content.decode() for name, content in page_files().items()}
    style, script = files["style.css"], bundle(files, "app.js")
    if "</style" in style.lower() or "</script" in script.lower():
        raise LeafwardError("the page's style or script holds the tag that would end it")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = "\n".join(
        f'<script type="application/octet-stream;base64" data-name="{html.escape(name)}">'
        f"{base64.b64encode(content).decode()}</script>"
        for name, content in static_parts(scene, progress).items()
    )
    page = files["index.html"]
    title = f"<title>{html.escape(scene.title)} · leafward</title>"
    page = re.sub(r"<title>.*?</title>", lambda _: title, page, count=1, flags=re.DOTALL)
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    replaced = {
        '<meta charset="utf-8">': meta,
        STYLE: f"<style>{style}</style>",
        SCRIPT: f'{data}\n<script type="module">{script}</script>',
    }
    for old, new in replaced.items():
        if page.count(old) != 1:
            raise LeafwardError(f"the page's index.html should hold {old} once")
        page = page.replace(old, new)
    return page


def static_parts(scene: Scene, progress: Callable[[float], None] = lambda share: None) -> dict[str, bytes]:
    """Everything that the page loads, by name, with the neighbours of all points where they are not too many."""
    scene = replace(scene, thumbnails=_first_thumbnails(scene))
    k = scene.k if len(scene) <= MOST_TABLE_POINTS else 0
    parts = {"scene.json": to_json(scene.describe("table", k))} | scene.parts()
    for number, view in enumerate(scene.views):
        if k:
            share = 1.0 / len(scene.views)
            parts |= _neighbours(
                view, k, lambda done, first=number * share, share=share: progress(first + share * done)
            )
    return parts | {f"thumb/{row}": content for row, content in scene.thumbnails.items()}


def _first_thumbnails(scene: Scene) -> dict[int, bytes]:
    """As many thumbnails as the file may hold."""
    kept: dict[int, bytes] = {}
    spent = 0
    for row, content in scene.thumbnails.items():
        spent += len(content)
        if spent > MOST_THUMBNAILS:
            break
        kept[row] = content
    return kept


def _neighbours(view: View, k: int, progress: Callable[[float], None]) -> dict[str, bytes]:
    """The tables of all neighbours and their distances in one view, block by block."""
    count = len(view.space.points)
    ids, gaps = [], []
    for rows in torch.arange(count).split(max(1, BLOCK // count)):
        near = view.neighbours.of(rows, k)
        ids.append(near[0])
        gaps.append(near[1])
        progress(int(rows[-1] + 1) / count)
    return {
        f"neighbours/{view.key}.bin": little(torch.cat(ids).numpy(), "<i4"),
        f"neighbour_distances/{view.key}.bin": little(torch.cat(gaps).numpy(), "<f4"),
    }


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bundle(files: Mapping[str, str], entry: str) -> str:
    """The modules that `entry` needs as one script."""
    done: dict[str, str] = {}

    def add(name: str, way: tuple[str, ...]) -> None:
        if name in done:
            return
        if name in way or name not in files:
            raise LeafwardError(f"module {name} is {'in a cycle' if name in way else 'missing'}: {' -> '.join(way)}")
        for found in _IMPORT.finditer(files[name]):
            add(found[3], (*way, name))
        done[name] = _scoped(name, files[name])

    add(entry, ())
    return "\n" + "\n".join(done.values()) + "\n"


def _scoped(name: str, text: str) -> str:
    """One module as a constant: what it exports, out of a function that holds the rest."""

    def bound(found: re.Match[str]) -> str:
        names, everything, source = found.groups()
        pattern = everything or "{ " + re.sub(r"\s+as\s+", ": ", " ".join(names.split())) + " }"
        return f"const {pattern} = {_variable(source)};"

    exported = _EXPORT.findall(text)
    body = _EXPORT.sub("", _IMPORT.sub(bound, text))
    left = _OTHER.search(body)
    if left is not None:
        raise LeafwardError(f"module {name} cannot go into one file because of: {left[0].strip()}")
    return f"const {_variable(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))
