"""A browser, scenes served to it, and windows on them, for the tests of the explorer's page."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from leafward.explorer import build_scene, create_app
from leafward.explorer.scene import Scene
from leafward.explorer.sources import Source, Space, branches
from leafward.explorer.tree import tree_layout
from leafward.geometry import Euclidean, Lorentz
from leafward.hierarchy import Taxonomy

HOSTILE = "<img src=x onerror=alert(1)>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--disable-dev-shm-usage"]
DISK, PLANE = "poincare", "euclidean"
# What the tests ask of a page, beside what the page itself offers.
PROBE = """
document.addEventListener('securitypolicyviolation', (e) => console.error('CSP ' + e.violatedDirective));
window.probe = {
  chart(i = 0) { const chart = leafward.charts[i]; chart.stale = true; chart.draw(); return chart; },
  pixel(chart, [x, y]) {
    const box = chart.host.getBoundingClientRect();
    const { half, unit } = chart.lens;
    return [box.left + half[0] + x * unit, box.top + half[1] - y * unit];
  },
  at([id, i]) { const chart = this.chart(i); return this.pixel(chart, chart.place(id)); },
  held([x, y, i]) {
    const chart = leafward.charts[i];
    const box = chart.host.getBoundingClientRect();
    return chart.camera.grab(chart.toFrame([x - box.left, y - box.top]));
  },
  seen([point, i]) {
    const chart = leafward.charts[i];
    return this.pixel(chart, leafward.mobius.transform(chart.camera.matrix(), point));
  },
  /** RGBA of a square of device pixels, by default the whole canvas, read from the card. */
  read(x = 0, y = 0, width, height) {
    const { gl } = leafward.charts[0].renderer;
    const [w, h] = [width ?? gl.drawingBufferWidth, height ?? gl.drawingBufferHeight];
    const out = new Uint8Array(4 * w * h);
    gl.readPixels(x, y, w, h, gl.RGBA, gl.UNSIGNED_BYTE, out);
    return [...out];
  },
  /** The three by three device pixels around a point of the frame. */
  around([x, y]) {
    const { lens, ratio } = leafward.charts[0];
    const [u, v] = [lens.half[0] + x * lens.unit, lens.half[1] + y * lens.unit].map((t) => Math.floor(t * ratio));
    return this.read(u - 1, v - 1, 3, 3);
  },
};
"""


@dataclasses.dataclass(frozen=True)
class Served:
    """A scene, the source that it was built from, and where a browser finds it."""

    scene: Scene
    source: Source
    url: str

    disk, plane, hostile = DISK, PLANE, HOSTILE

    def node(self, name: str) -> int:
        return self.scene.labels.index(name)


def drawn_taxonomy(title: str, tax: Taxonomy) -> Source:
    """A taxonomy drawn in the disk, and beside it the same points as vectors of a plane."""
    layout = tree_layout(tax)
    manifold = Lorentz(1.0)
    points = manifold.from_poincare(torch.from_numpy(layout.coordinates))
    spaces = (
        Space(DISK, "Poincaré disk", manifold, points, drawn=layout),
        Space(PLANE, "Euclidean twin", Euclidean(), manifold.logmap0(points)),
    )
    return Source(title, list(tax.names), spaces, branches(tax), tax, np.arange(len(tax)), own=True)


def zoo() -> Taxonomy:
    """Root, 5 kinds, 4 families of each, 6 species of each family; one name is hostile."""
    edges: list[tuple[str, str | None]] = [("life", None)]
    for kind in "ABCDE":
        edges.append((f"kind {kind}", "life"))
        for family in range(4):
            edges.append((f"family {kind}{family}", f"kind {kind}"))
            edges += [(f"species {kind}{family}{s}", f"family {kind}{family}") for s in range(6)]
    edges.append((HOSTILE, "kind A"))
    return Taxonomy.from_edges(edges)


def bush(count: int) -> Taxonomy:
    """A complete tree with eight children a node."""
    return Taxonomy.from_edges([("n0", None), *((f"n{i}", f"n{(i - 1) // 8}") for i in range(1, count))])


def grey_photo() -> bytes:
    from matplotlib import image

    buffer = io.BytesIO()
    image.imsave(buffer, np.full((6, 8, 3), 0.5), format="jpg")
    return buffer.getvalue()


@contextlib.contextmanager
def serving(scene: Scene, source: Source) -> Iterator[Served]:
    """The scene on a free port of this machine, in a thread."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    pytest.importorskip("fastapi", reason="fastapi is not installed")
    token = secrets.token_urlsafe(24)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        host = f"127.0.0.1:{bound.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(create_app(scene, token, {host}), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        yield Served(scene, source, f"http://{host}/{token}/")
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    source = drawn_taxonomy("Zoo & <b>co</b>", zoo())
    scene = dataclasses.replace(build_scene(source), thumbnails={i: grey_photo() for i in range(len(source.names))})
    with serving(scene, source) as it:
        yield it


@pytest.fixture
def pictured_leaves() -> Iterator[Served]:
    """A taxonomy whose leaves alone have pictures."""
    tax = zoo()
    source = drawn_taxonomy("Zoo", tax)
    leaves = {row: grey_photo() for row, name in enumerate(tax.names) if name.startswith("species")}
    with serving(dataclasses.replace(build_scene(source), thumbnails=leaves), source) as it:
        yield it


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on this machine")
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield started
        started.close()


class Window:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, url: str, ready: bool = True, script: str = "", **options: Any) -> None:
        options = {"viewport": {"width": 960, "height": 600}, "reduced_motion": "reduce"} | options
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        self.page.add_init_script(PROBE + script)
        self.page.goto(url)
        if ready:
            self.js("async () => { await leafward.ready; probe.chart(); }")

    def js(self, code: str, *arguments: Any) -> Any:
        return self.page.evaluate(code, *arguments)

    def at(self, node: int, chart: int = 0) -> tuple[float, float]:
        """Where a point is drawn, in pixels of the window."""
        x, y = self.js("(a) => probe.at(a)", [node, chart])
        return x, y

    def held(self, x: float, y: float, chart: int = 0) -> list[float]:
        """The model's point under a pixel of the window."""
        return self.js("(a) => probe.held(a)", [x, y, chart])

    def seen(self, point: list[float], chart: int = 0) -> tuple[float, float]:
        """The pixel of the window at which a point of the model is seen."""
        x, y = self.js("(a) => probe.seen(a)", [point, chart])
        return x, y

    def until(self, condition: str) -> None:
        """Wait for a condition; the page's policy forbids the polling of `wait_for_function`, which needs eval."""
        end = time.monotonic() + 30
        while not self.js(f"() => Boolean({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.03)

    def isometry(self) -> list[float]:
        return self.js("() => leafward.charts[0].camera.pose.isometry")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def begin_again(self) -> None:
        """As if just loaded: one view at home, nothing selected, asked or faded."""
        self.page.emulate_media(color_scheme="light")
        self.js(
            """async (key) => { const e = leafward.explorer; e.search.clear(); document.activeElement.blur();
            Object.assign(e.state, { selected: null, kept: null, bin: null, colour: 'level' }); e.look(null);
            e.charts[0].view = null; await e.show([key]); e.charts[0].draw(); }""",
            DISK,
        )


@pytest.fixture(scope="module")
def opened(browser: Any, served: Served) -> Iterator[Window]:
    it = Window(browser, served.url)
    yield it
    it.context.close()


@pytest.fixture
def window(opened: Window) -> Iterator[Window]:
    opened.page.mouse.move(1, 1)
    opened.begin_again()
    yield opened
    problems = opened.problems.copy()
    opened.problems.clear()
    assert problems == []


@pytest.fixture
def open_window(browser: Any) -> Iterator[Callable[..., Window]]:
    """Opens further windows, closed at the end of the test."""
    windows = []

    def open_it(*arguments: Any, **options: Any) -> Window:
        windows.append(Window(browser, *arguments, **options))
        return windows[-1]

    yield open_it
    for window in windows:
        window.context.close()


@pytest.fixture(scope="module")
def crowded(browser: Any) -> Iterator[Window]:
    source = drawn_taxonomy("bush", bush(100_000))
    source = dataclasses.replace(source, spaces=source.spaces[:1])
    with serving(build_scene(source), source) as served:
        window = Window(browser, served.url)
        yield window
        window.context.close()
        assert window.problems == []
