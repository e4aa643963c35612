"""The page: well-formed, self-contained, escaped, the same bytes each time."""

import base64
import re
from html.parser import HTMLParser

import pytest

from leafward.errors import UsageError
from leafward.report import Estimate, Result, new_figure
from leafward.report.render import flatten

VOID = {"meta", "img", "br", "hr", "link", "input"}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Document(HTMLParser):
    """Checks that tags nest, and collects tags with attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def plot():
    figure, axes = new_figure()
    axes.plot([1, 2, 3], [1, 4, 9], label="a")
    return figure


def full_page(word="plain"):
    page = Result(f"Title {word}", f"Subtitle {word}")
    page.headline(
        [
            Estimate(1.0712, (0.951, 1.193), f"exponent {word}", note=f"note {word}"),
            Estimate(71.32, (70.2, 72.4), "accuracy", word, "higher", twin=Estimate(69.81, (68.7, 70.9))),
            Estimate(None, name="absent"),
        ]
    )
    for title in ("Run", "Tables", "Figures", f"Rest {word}"):
        page.section(title)
    page.text(f"One {word}.\n\nTwo {word}.")
    page.note(f"Mind {word}.")
    page.table(["name", word], [[word, 1.5], ["x", None]], caption=f"Caption {word}")
    page.figure(plot(), f"Figure {word}")
    page.figure(plot(), "again")
    page.image(PNG, alt=f"alt {word}", caption=f"image {word}")
    page.command(f"leafward train {word} --seeds 3")
    page.details("Environment", {"torch": "2.15", word: {word: [word, 1, None]}})
    return page


def test_page_is_well_formed_and_self_contained():
    html = full_page().html()
    document = Document(html)
    tags = {tag for tag, _ in document.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, attributes in document.tags:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:image/"))
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    assert "http://" not in html
    assert "https://" not in html
    policy = next(m["content"] for m in document.named("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    ids = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    anchors = [a["href"][1:] for a in document.named("a")]
    assert len(anchors) == 4
    assert set(anchors) <= set(ids)
    assert "prefers-color-scheme:dark" in html
    assert "@media print" in html


@pytest.mark.parametrize(
    "word",
    ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7*7 }}", "</style></svg>&amp;", "φ½ α γ"],
)
def test_everything_from_outside_is_escaped(word):
    html = full_page(word).html()
    document = Document(html)
    assert {tag for tag, _ in document.tags} == {tag for tag, _ in Document(full_page().html()).tags}
    assert not [a for _, attributes in document.tags for a in attributes if a.startswith("on")]
    text = "".join(document.texts)
    for phrase in ("Title", "Subtitle", "exponent", "note", "Rest", "One", "Mind", "Caption", "Figure", "image"):
        assert f"{phrase} {word}" in text
    assert f"leafward train {word} --seeds 3" in text
    assert f"{word}.{word}" in text
    assert document.named("img")[0]["alt"] == f"alt {word}"


def test_the_same_page_gives_the_same_bytes(tmp_path):
    full_page().write(tmp_path / "a.html")
    full_page().write(tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_headline_shows_interval_and_twin():
    text = " ".join("".join(Document(full_page().html()).texts).split())
    assert "1.07 [0.95, 1.19]" in text
    assert "71.3 plain [70.2, 72.4] Euclidean twin 69.8 [68.7, 70.9] higher is better" in text
    assert "absent –" in text


def test_tables():
    page = Result("t")
    columns = [f"column {i}" for i in range(40)]
    page.table(columns, [["x", Estimate(1.0, (0.9, 1.1)), *[0.5] * 38], ["y", None, *[1.25] * 38]])
    html = page.html()
    document = Document(html)
    box = html.index('<div class="scroll"')
    assert box < html.index("<table>")
    numeric = [attributes for attributes in document.named("td") if attributes.get("class") == "number"]
    assert len(numeric) == 2 * 39
    assert {"1.00 [0.90, 1.10]", "–", "0.50", "1.25"} <= set(document.texts)
    page.table(["a"], [])
    assert "no rows" in page.html()
    with pytest.raises(UsageError, match="row 1 of the table has 1 cells for 2 columns"):
        page.table(["a", "b"], [[1, 2], [3]])


def test_contents_need_four_sections():
    page = Result("t")
    for title in "abc":
        page.section(title)
    assert not Document(page.html()).named("nav")
    page.section("d")
    assert Document(page.html()).named("nav")


def test_figures_that_follow_one_another_share_a_grid():
    page = Result("t")
    page.figure(plot(), "one")
    page.figure(new_figure(width=10)[0], "wide")
    page.text("between")
    page.figure(plot(), "two")
    html = page.html()
    assert html.count('<div class="figures">') == 2
    assert html.count('<figure class="wide">') == 1
    assert [svg["aria-label"] for svg in Document(html).named("svg")] == ["one", "wide", "two"]


def test_images_must_be_images():
    with pytest.raises(UsageError, match="PNG or JPEG"):
        Result("t").image(b"<svg onload=alert(1)>", alt="x")


def test_bytes_that_are_no_text_do_not_break_the_page(tmp_path):
    Result("run \udcff").write(tmp_path / "page.html")
    assert "<h1>run ?</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_flatten():
    nested = {"a": {"b": 1, "c": {}}, "d": [1, 2.5, None], "e": [{"f": 3}, [4]], "g": None}
    flat = flatten(nested)
    assert flat == {"a.b": 1, "a.c": "", "d": "1, 2.5, null", "e.0.f": 3, "e.1": "4", "g": None}
    endless: dict[str, object] = {"x": 1}
    endless["left"] = endless["right"] = endless
    assert 1000 < len(flatten(endless)) < 10_000
