"""Figures: colours that work for all eyes on light and dark paper, and clean, stable SVG."""

import itertools
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from leafward.errors import UsageError
from leafward.report import Estimate, figures
from leafward.report.figures import (
    COLOURS,
    LIGHT,
    SERIES,
    dots,
    legend,
    line_with_band,
    literal,
    log_axis,
    new_figure,
    points_with_bars,
    save_svg,
    to_svg,
)

SVG = "{http://www.w3.org/2000/svg}"

# Machado, Oliveira & Fernandes 2009, severity 1: linear RGB as a dichromat sees it
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(first, second):
    low, high = sorted((TO_XYZ @ linear(colour))[1] for colour in (first, second))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / TO_XYZ.sum(1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def example(title="loss", colour=None):
    figure, axes = new_figure()
    x = np.arange(1, 9)
    line_with_band(axes, x, 1.0 / x, 0.8 / x, 1.2 / x, label="γ = −1", color=colour)
    points_with_bars(axes, x, 2.0 / x, 1.8 / x, 2.2 / x, label="γ = 1")
    axes.set(title=literal(title), xlabel="width m", ylabel="φ½")
    log_axis(axes)
    legend(axes)
    return figure


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
def test_palette_is_visible_and_told_apart(shade):
    paper = COLOURS["paper"][shade]
    assert contrast(COLOURS["ink"][shade], paper) > 12
    assert contrast(COLOURS["muted"][shade], paper) > 4.5
    series = [COLOURS[f"series-{i + 1}"][shade] for i in range(len(SERIES))]
    assert all(contrast(colour, paper) >= 3 for colour in series)
    for name, matrix in VISION.items():
        for first, second in itertools.combinations(series, 2):
            seen = [lab(np.asarray(matrix) @ linear(colour)) for colour in (first, second)]
            assert np.linalg.norm(seen[0] - seen[1]) > 15, (name, first, second)


def test_svg_is_stable_and_self_contained():
    figure = example()
    svg = to_svg(figure)
    assert svg == to_svg(figure) == to_svg(example())
    assert "http" not in svg
    assert "<style" not in svg
    assert "metadata" not in svg
    root = ElementTree.fromstring(svg)
    texts = ["".join(text.itertext()) for text in root.iter("text")]
    assert {"width m", "φ½", "γ = −1", "1", "0.1"} <= set(texts)


def test_every_colour_of_the_svg_follows_the_page():
    """Each fill and stroke is a colour of the palette, and the style sheet has a rule for it."""
    css = figures.figure_css()
    root = ElementTree.fromstring(to_svg(example(colour="black")))
    used = {(kind, element.get(kind)) for element in root.iter() for kind in ("fill", "stroke")} - {
        ("fill", None),
        ("stroke", None),
        ("fill", "none"),
        ("stroke", "none"),
    }
    assert ("stroke", SERIES[0]) in used
    assert ("stroke", LIGHT["ink"]) in used  # black follows the ink
    for kind, colour in used:
        assert f'[{kind}="{colour}"]{{{kind}:var(--' in css
    assert "svg" not in css  # an element drawn by <use> has no <svg> above it
    assert not re.search(r"(fill|stroke):\s*#", to_svg(example()))
    dark = figures.colour_css().partition("prefers-color-scheme:dark")[2]
    assert all(f"--{name}:{pair[1]};" in dark for name, pair in COLOURS.items())


def test_background_is_transparent():
    root = ElementTree.fromstring(to_svg(example()))
    background = root.find(".//g[@id]/g/path")
    assert background is not None
    assert background.get("fill") == "none"


def test_ids_are_unique_and_resolve():
    first, second = to_svg(example("one")), to_svg(example("two"))
    ids = re.findall(r' id="([^"]+)"', first + second)
    assert len(set(ids)) == len(ids)
    for svg in (first, second, to_svg(example(), prefix="f7-")):
        known = set(re.findall(r' id="([^"]+)"', svg))
        used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
        assert used
        assert used <= known
    assert all(name.startswith("f7-") for name in re.findall(r' id="([^"]+)"', to_svg(example(), prefix="f7-")))


def test_labels_are_data():
    """Markup, ids, colours, formulas and control characters in a label stay text."""
    label = f'</text><script>x</script> id="a" url(#b) {SERIES[0]} $\\bad{{$ \x00\x1b \ud800 & 5 $'
    svg = to_svg(example(label), prefix="f1-")
    root = ElementTree.fromstring(svg)
    assert not list(root.iter("script"))
    texts = ["".join(text.itertext()) for text in root.iter("text")]
    assert label.translate({0: "\ufffd", 0x1B: "\ufffd", 0xD800: "\ufffd"}) in texts


@pytest.mark.filterwarnings("error")
def test_labels_in_any_script():
    figure, axes = new_figure()
    axes.set(xlabel="幅 🌱", title="bell \x07")
    svg = to_svg(figure)
    assert ">幅 🌱<" in svg
    assert ">bell \ufffd<" in svg


def test_links_out_of_a_figure_are_dropped():
    figure, axes = new_figure()
    axes.plot([1, 2], [1, 2])[0].set_url("https://example.org/x")
    axes.imshow(np.eye(4))
    svg = to_svg(figure)
    assert "example.org" not in svg
    assert 'href="data:image/png;base64,' in svg


def test_standalone_file(tmp_path):
    save_svg(example(), tmp_path / "deep" / "figure.svg", alt="Loss & width")
    text = (tmp_path / "deep" / "figure.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.get("aria-label") == "Loss & width"
    sheet = root.find(f"{SVG}style")
    assert sheet is not None
    assert sheet.text
    assert "prefers-color-scheme:dark" in sheet.text
    assert "var(--series-1)" in sheet.text
    assert "background:var(--paper)" in sheet.text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_log_labels_are_plain_text():
    figure, axes = new_figure()
    axes.plot([1e-6, 1e6], [1, 3])
    log_axis(axes, "x")
    svg = to_svg(figure)
    assert ">10⁻⁶<" in svg
    assert ">10⁶<" in svg
    assert ">0.01<" in svg
    assert "tspan" not in svg
    figure, axes = new_figure()
    axes.plot([1, 2], [2.0, 5.0])
    log_axis(axes, "y")
    assert ">3<" in to_svg(figure)  # less than a decade: the ticks between are labelled


def test_figures_leave_no_global_state():
    script = (
        "import sys, leafward.report as r\n"
        "assert not {'matplotlib', 'jinja2', 'yaml', 'numpy', 'torch'} & set(sys.modules)\n"
        "def draw():\n"
        "    fig, ax = r.new_figure(); ax.plot([1, 2], label='a'); r.log_axis(ax); r.legend(ax); r.to_svg(fig)\n"
        "draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "import matplotlib; before = dict(matplotlib.rcParams)\n"
        "draw()\n"
        "assert dict(matplotlib.rcParams) == before\n"
        "assert set(r.__all__) <= set(dir(r)) and all(hasattr(r, name) for name in r.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_bad_arguments():
    figure, axes = new_figure()
    with pytest.raises(UsageError, match="width of a figure"):
        new_figure(width=0)
    with pytest.raises(UsageError, match="height of a figure"):
        new_figure(height=float("nan"))
    with pytest.raises(UsageError, match="low and high"):
        line_with_band(axes, [1], [1], low=[1])
    with pytest.raises(UsageError, match="which must be"):
        log_axis(axes, "z")
    assert figure is axes.figure


def test_dots_stand_in_their_order_with_their_intervals():
    figure = dots({"b": Estimate(0.2, (0.1, 0.4)), "a": Estimate(0.5), "none": Estimate(None)})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a", "none"]
    top, bottom = axes.transData.transform([(0, 0), (0, 2)])[:, 1]
    assert top > bottom
    (bar,) = axes.collections
    assert bar.get_segments()[0].tolist() == [[0.1, 0.0], [0.4, 0.0]]
