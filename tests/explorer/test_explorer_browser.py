"""The explorer's page in a real browser: every gesture, the panel, the exports and what must be refused."""

from __future__ import annotations

import http.client
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from leafward.geometry import poincare


def test_page_shows_the_scene_and_names_as_text(window: Any, served: Any) -> None:
    assert window.texts("#heading h1") == ["Zoo & <b>co</b>"]
    assert window.texts("#heading p") == [f"{len(served.scene)} points · {len(served.scene.edges)} edges"]
    hostile = served.node(served.hostile)
    window.js("(id) => leafward.explorer.select(id)", hostile)
    assert window.texts("#chosen h2") == [served.hostile]
    assert window.page.locator("#path img").count() == 0
    named = [label["text"] for label in window.js("() => leafward.charts[0].labels")]
    assert "life" in named


def test_drag_keeps_the_grabbed_point_under_the_pointer(window: Any, served: Any) -> None:
    node = served.node("kind C")
    x, y = map(round, window.at(node))
    held = window.held(x, y)
    mouse = window.page.mouse
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + 40, y - 25, steps=4)
    assert window.seen(held) == pytest.approx((x + 40, y - 25), abs=0.01)
    mouse.move(430, 300, steps=5)
    mouse.up()
    assert window.seen(held) == pytest.approx((430, 300), abs=0.01)
    assert window.at(node) == pytest.approx((430, 300), abs=4)
    ar, ai, br, bi = window.isometry()
    assert abs(ar**2 + ai**2 - br**2 - bi**2 - 1) < 1e-9
    assert window.js("() => leafward.state.selected") is None
    a, b = served.node("kind A"), served.node("species E35")
    xy = served.scene.views[0].layout.coordinates
    true = float(poincare.dist(torch.from_numpy(xy[a]), torch.from_numpy(xy[b]), 1.0))
    seen = window.js(
        "([a, b]) => leafward.mobius.distance(leafward.charts[0].place(a), leafward.charts[0].place(b))", [a, b]
    )
    assert seen == pytest.approx(true, rel=1e-6)


def test_wheel_flies_to_the_pointer_and_back(window: Any, served: Any) -> None:
    node = served.node("kind D")
    distance = (
        "(id) => { const c = leafward.charts[0]; c.draw(); return leafward.mobius.distance([0, 0], c.place(id)); }"
    )
    before = window.js(distance, node)
    window.page.mouse.move(*window.at(node))
    window.page.mouse.wheel(0, -150)
    window.until("leafward.charts[0].camera.pose.isometry[2] !== 0")
    after = window.js(distance, node)
    assert before - after == pytest.approx(0.45, abs=1e-3)  # one translation along the diameter through the pointer
    for _ in range(4):
        window.page.mouse.wheel(0, 400)
    window.until("leafward.mobius.reach(leafward.charts[0].camera.pose.isometry) < 1e-6")


def test_double_click_centres_and_reset_goes_home(window: Any, served: Any) -> None:
    node = served.node("family E1")
    window.page.mouse.dblclick(*window.at(node))
    middle = window.js("() => probe.pixel(leafward.charts[0], [0, 0])")
    assert np.hypot(*np.subtract(window.at(node), middle)) < 0.5
    window.page.click("#nearer")
    assert window.js("() => leafward.charts[0].camera.zoom") == pytest.approx(1.5)
    window.page.click("#reset")
    assert window.isometry() == pytest.approx([1, 0, 0, 0], abs=1e-9)
    assert window.js("() => leafward.charts[0].camera.zoom") == pytest.approx(1.0)


def test_keys_move_magnify_select_and_clear(window: Any, served: Any) -> None:
    page = window.page
    page.focus(".chart")
    root = served.node("life")
    x, y = window.at(root)
    page.keyboard.press("ArrowRight")
    moved = window.at(root)
    assert moved[0] < x - 10
    assert moved[1] == pytest.approx(y, abs=0.5)
    page.keyboard.press("+")
    assert window.js("() => leafward.charts[0].camera.zoom") > 1
    page.keyboard.press("0")
    page.keyboard.press("Enter")
    assert window.js("() => leafward.state.selected") == root
    page.keyboard.press("Escape")
    assert window.js("() => leafward.state.selected") is None


def test_search_by_keyboard_selects_and_centres(window: Any, served: Any) -> None:
    page = window.page
    page.keyboard.press("/")
    page.keyboard.type("FAMILY c")
    assert window.texts("#found li") == [f"family C{i}" for i in range(4)]
    assert window.texts("#count") == ["4 found"]
    faded = window.js("() => leafward.charts[0].mask.reduce((a, b) => a + b)")
    assert faded == 4
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    node = served.node("family C1")
    assert window.js("() => leafward.state.selected") == node
    assert (
        window.js("(id) => { const c = leafward.charts[0]; c.draw(); return Math.hypot(...c.place(id)); }", node) < 1e-6
    )
    page.keyboard.press("Escape")
    assert page.input_value("#query") == ""
    page.keyboard.type("no such name")
    assert window.texts("#count") == ["0 found"]


def test_click_shows_neighbours_ancestors_and_the_path(window: Any, served: Any) -> None:
    node = served.node("family D2")
    window.page.mouse.click(*window.at(node))
    window.page.wait_for_selector("#neighbours li")
    assert window.texts("#chosen h2") == ["family D2"]
    assert window.texts("#path .name") == ["family D2", "kind D", "life"]
    space = served.source.spaces[0]
    gaps = space.manifold.dist(space.points[node], space.points)
    gaps[node] = torch.inf
    nearest = torch.sort(gaps).values[: served.scene.k]
    shown = window.texts("#neighbours .name")
    assert len(shown) == served.scene.k
    torch.testing.assert_close(gaps[[served.node(name) for name in shown]], nearest, rtol=1e-5, atol=1e-5)
    marks = window.js("() => leafward.charts[0].marks")
    assert [served.scene.labels[i] for i in marks["path"]] == ["family D2", "kind D", "life"]
    assert [served.scene.labels[i] for i in marks["neighbours"]] == shown
    window.page.click("#path .name >> text=kind D")
    assert window.texts("#chosen h2") == ["kind D"]
    facts = window.texts("#chosen dl")[0]
    assert "level1" in facts
    assert "children4" in facts


def test_a_server_that_has_gone_is_said(window: Any, served: Any) -> None:
    window.page.route("**/neighbours.json*", lambda route: route.abort())
    window.page.route(f"**/view/{served.plane}.bin", lambda route: route.abort())
    try:
        window.js("(id) => leafward.explorer.select(id)", served.node("kind A"))
        assert "no longer answers" in window.texts("#neighbours .trouble")[0]
        window.js("(key) => leafward.explorer.change([key])", served.plane)
        assert "no longer answers" in window.texts("#views .trouble")[0]
        assert window.page.is_checked(f"#views input[value={served.disk}]")
    finally:
        window.page.unroute_all()
    assert all("ERR_FAILED" in problem for problem in window.problems)
    window.problems.clear()
    window.js("(key) => leafward.explorer.change([key])", served.plane)  # it can be asked for again
    assert window.texts("#views .trouble") == []
    assert window.js("() => leafward.charts[0].camera.curved") is False


def test_hover_names_the_point_and_shows_its_thumbnail(window: Any, served: Any) -> None:
    node = served.node("kind E")
    window.page.mouse.move(*window.at(node))
    window.page.wait_for_selector("#tip:not([hidden]) img:not([hidden])")
    assert window.texts("#tip strong") == ["kind E"]
    assert window.js("() => document.querySelector('#tip img').naturalWidth") == 8
    window.page.mouse.move(5, 500)
    window.page.wait_for_selector("#tip", state="hidden")


def test_pictures_that_do_not_exist_are_not_asked_for(open_window: Any, pictured_leaves: Any) -> None:
    window = open_window(pictured_leaves.url)
    page, failed = window.page, []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    for name in ("life", "kind E"):
        page.mouse.move(*window.at(pictured_leaves.node(name)))
        page.wait_for_selector("#tip:not([hidden])")
        assert window.texts("#tip strong") == [name]
        page.mouse.click(*window.at(pictured_leaves.node(name)))
        page.wait_for_selector("#neighbours li")
    page.wait_for_load_state("networkidle")
    assert page.locator("img:not([hidden])").count() == 0
    window.js("(id) => leafward.explorer.select(id, { centre: true })", pictured_leaves.node("species B21"))
    page.wait_for_selector("#chosen > img:not([hidden])")
    assert failed == []
    assert window.problems == []


def test_two_views_side_by_side_share_the_selection(window: Any, served: Any) -> None:
    page = window.page
    page.select_option("#beside select", served.plane)
    window.until("leafward.charts.length === 2 && leafward.charts[1].camera")
    node = served.node("family B1")
    page.mouse.click(*window.at(node))
    page.wait_for_selector("#neighbours .columns > :nth-child(2) li")
    assert window.js("() => leafward.charts.map((c) => c.marks.selected)") == [node, node]
    x, y = map(round, window.at(node, chart=1))
    held = window.held(x, y, chart=1)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 30, y + 22, steps=3)
    page.mouse.up()
    assert window.seen(held, chart=1) == pytest.approx((x - 30, y + 22), abs=0.01)
    page.mouse.wheel(0, -200)  # ordinary zoom: what is under the pointer stays
    window.until("leafward.charts[1].camera.pose.scale > 1")
    assert window.seen(held, chart=1) == pytest.approx((x - 30, y + 22), abs=0.01)
    page.select_option("#beside select", "")
    window.until("leafward.charts.length === 1")


def test_colours_by_level_class_and_radius(window: Any, served: Any) -> None:
    page = window.page
    scene = served.scene
    colours = {}
    for mode, values in (("level", scene.level), ("class", scene.class_of)):
        page.check(f"#colours input[value={mode}]", force=True)
        rgba = np.array(window.js("() => [...leafward.charts[0].rgba]")).reshape(-1, 4)
        colours[mode] = rgba
        groups = len({(int(value), *map(int, colour)) for value, colour in zip(values, rgba, strict=True)})
        assert groups == len(set(values.tolist())) == len({tuple(colour) for colour in rgba.tolist()})
    page.check("#colours input[value=radius]", force=True)
    assert page.locator("#legend canvas").count() == 1
    page.check("#colours input[value=level]", force=True)
    page.click("#legend button >> nth=1")
    assert window.js("() => [...leafward.charts[0].mask]") == (scene.level == 1).astype(int).tolist()
    page.emulate_media(color_scheme="dark")
    window.until("leafward.explorer.theme.name === 'dark'")
    assert not np.array_equal(
        np.array(window.js("() => [...leafward.charts[0].rgba]")).reshape(-1, 4), colours["level"]
    )


def test_histogram_counts_the_radii(window: Any, served: Any) -> None:
    radii = served.scene.views[0].radius()
    counts = window.js("() => leafward.explorer.panel.histogram.counts")
    np.testing.assert_array_equal(np.cumsum(counts)[-1], len(radii))
    width = (radii.max() - radii.min()) / len(counts)
    expected, edges = np.histogram(radii.astype(np.float64), bins=len(counts))
    clear = np.abs(radii[:, None] - edges[1:-1]).min(axis=1) > 1e-4 * width  # not on a border, where rounding decides
    assert np.abs(np.array(counts) - expected).sum() <= 2 * (~clear).sum()
    window.page.locator("#histogram .bar").last.click()
    kept = window.js("() => leafward.charts[0].mask.reduce((a, b) => a + b)")
    assert kept == counts[-1]


def test_export_as_png_and_svg(window: Any, served: Any, tmp_path: Path) -> None:
    page = window.page
    window.js("(id) => leafward.explorer.select(id)", served.node(served.hostile))
    for kind in ("png", "svg"):
        with page.expect_download() as download:
            page.click(f"#{kind}")
        assert download.value.suggested_filename == f"Zoo-b-co-b.{kind}"
        download.value.save_as(tmp_path / f"picture.{kind}")
    png = (tmp_path / "picture.png").read_bytes()
    width, height = window.js("() => [leafward.charts[0].width, leafward.charts[0].height]")
    assert png.startswith(b"\x89PNG")
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (2 * width, 2 * height)
    root = ET.parse(tmp_path / "picture.svg").getroot()
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("circle") >= len(served.scene)
    assert not {"script", "img", "image", "foreignObject"} & set(kinds)
    assert served.hostile in ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("}text")]
    arcs = [element.get("d", "") for element in root.iter() if element.tag.endswith("}path")]
    assert arcs[0].count("A") > 50
    off = window.js(  # the middle of each arc, as the browser reads the path, against the geodesic's
        """(d) => { const c = leafward.charts[0]; const m = leafward.mobius; const { half, unit } = c.lens;
        return d.split('M').slice(1).map((part, e) => {
          const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
          path.setAttribute('d', 'M' + part);
          const at = path.getPointAtLength(path.getTotalLength() / 2);
          const [p, q] = [0, 1].map((k) => c.place(c.scene.edges[2 * e + k]));
          const [x, y] = m.arcPoint(p, q, m.arcTurn(p, q), 0.5);
          return Math.hypot(at.x - half[0] - x * unit, at.y - half[1] + y * unit); }); }""",
        arcs[0],
    )
    assert len(off) == len(served.scene.edges)
    assert max(off) < 0.1


def test_exported_page_works_from_disk_without_a_network(
    window: Any, open_window: Any, served: Any, tmp_path: Path
) -> None:
    with window.page.expect_download() as download:
        window.page.click("#html")
    assert download.value.suggested_filename == "Zoo-b-co-b.html"
    file = tmp_path / "scene.html"
    download.value.save_as(file)
    offline = open_window(file.as_uri(), offline=True)
    assert offline.page.locator("#html").is_hidden()
    node = served.node("family A1")
    offline.page.mouse.click(*offline.at(node))
    offline.page.wait_for_selector("#neighbours li")
    assert offline.texts("#path .name") == ["family A1", "kind A", "life"]
    asked = offline.js("() => leafward.charts[0].marks.neighbours")
    window.page.mouse.click(*window.at(node))
    window.page.wait_for_selector("#neighbours li")
    assert asked == window.js("() => leafward.charts[0].marks.neighbours")
    assert offline.problems == []


def test_wrong_token_foreign_origin_and_traversal_are_refused(browser: Any, served: Any) -> None:
    address = urlsplit(served.url)
    host = f"http://{address.netloc}"
    page = browser.new_page()
    for path in ("/", "/wrong/", "/wrong/scene.json", f"{address.path[:-2]}/", "/favicon.ico"):
        assert page.goto(host + path).status == 404, path
    for path in ("page/%2e%2e%2fserver.py", "page/..%2f..%2f..%2f..%2fetc%2fpasswd", "page/", "thumb/-1"):
        assert page.goto(served.url + path).status in (400, 404), path
    connection = http.client.HTTPConnection(address.netloc)
    for path in ("page/../../server.py", "page//etc/passwd", "../scene.json"):
        connection.putrequest("GET", address.path + path)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 404, path
        assert b"def " not in answer.read()
    connection.close()
    answers = []
    page.on("response", lambda response: answers.append(response.status))
    page.goto("data:text/html,<p>elsewhere</p>")
    reached = page.evaluate("(url) => fetch(url + 'labels.json').then((r) => r.text(), () => null)", served.url)
    assert reached is None
    assert answers[-1:] in ([], [403])
    page.close()


def test_missing_webgl_is_said(open_window: Any, served: Any) -> None:
    script = """{ const real = HTMLCanvasElement.prototype.getContext;
    HTMLCanvasElement.prototype.getContext = function (kind, ...rest) {
      return kind === 'webgl2' ? null : real.call(this, kind, ...rest); }; }"""
    window = open_window(served.url, ready=False, script=script)
    window.page.wait_for_selector("#message:not([hidden])")
    assert "WebGL2" in window.texts("#message")[0]


def test_phone_has_a_sheet_and_nothing_overflows(open_window: Any, served: Any) -> None:
    window = open_window(served.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = window.page
    assert window.js("() => document.documentElement.scrollWidth") <= 390
    node = served.node("kind B")
    page.touchscreen.tap(*window.at(node))
    assert window.texts("#chosen h2") == ["kind B"]
    page.tap("#grip")
    assert page.get_attribute("#grip", "aria-expanded") == "true"
    window.until("document.getElementById('panel').getBoundingClientRect().bottom <= innerHeight + 1")
    page.locator("#png").scroll_into_view_if_needed()
    assert page.locator("#png").is_visible()
    assert window.problems == []
