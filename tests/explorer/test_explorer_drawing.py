"""What the explorer's page computes and draws, in a real browser: isometries, arcs, shaders, names, many points."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from leafward.geometry import poincare


def disk_points(count: int, seed: int, reach: float = 8.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    radius, angle = np.tanh(rng.uniform(0, reach, count) / 2), rng.uniform(0, 2 * np.pi, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def test_isometries_agree_with_the_library(window: Any) -> None:
    p, q, b = (disk_points(60, seed, reach=6.0) for seed in (1, 2, 3))
    out = window.js(
        """([p, q, b]) => { const m = leafward.mobius; return p.map((_, i) => {
        const g = m.compose(m.translation(b[i]), m.compose(m.dragging(p[i], q[i]), [Math.cos(i), Math.sin(i), 0, 0]));
        return { added: m.apply(m.translation(b[i]), p[i]), dragged: m.apply(m.dragging(p[i], q[i]), p[i]),
          here: m.distance(p[i], q[i]), there: m.distance(m.apply(g, p[i]), m.apply(g, q[i])),
          back: m.apply(m.inverse(g), m.apply(g, p[i])), norm: g[0]**2 + g[1]**2 - g[2]**2 - g[3]**2,
          all: [...m.transformAll(m.matrixOf(g), p[i], new Float64Array(2))], one: m.apply(g, p[i]) }; }); }""",
        [p.tolist(), q.tolist(), b.tolist()],
    )
    tp, tq, tb = map(torch.from_numpy, (p, q, b))
    true = poincare.dist(tp, tq, 1.0).numpy()
    np.testing.assert_allclose([o["here"] for o in out], true, rtol=1e-9)
    np.testing.assert_allclose([o["there"] for o in out], true, rtol=1e-6)
    np.testing.assert_allclose([o["added"] for o in out], poincare.mobius_add(tb, tp, 1.0).numpy(), atol=1e-10)
    np.testing.assert_allclose([o["dragged"] for o in out], q, atol=1e-8)
    np.testing.assert_allclose([o["back"] for o in out], p, atol=1e-8)
    np.testing.assert_allclose([o["norm"] for o in out], 1.0, atol=1e-9)
    np.testing.assert_allclose([o["all"] for o in out], [o["one"] for o in out], atol=1e-12)


def test_arcs_are_geodesics_and_rings_are_circles(window: Any) -> None:
    p, q = disk_points(40, 4, reach=5.0), disk_points(40, 5, reach=5.0)
    p[0], q[0] = [0.5, 0.0], [-0.25, 0.0]  # a diameter
    t = [0.0, 0.25, 0.5, 0.75, 1.0]
    arcs, rings, mean = window.js(
        """([p, q, t]) => { const m = leafward.mobius;
        const arcs = p.map((a, i) => t.map((s) => m.arcPoint(a, q[i], m.arcTurn(a, q[i]), s)));
        const g = m.translation([0.6, -0.3]);
        const rings = [0.2, 0.7].map((r) => { const c = m.circleImage(g, r);
          return Array.from({ length: 9 }, (_, k) => { const [x, y] = m.apply(g, [r * Math.cos(k), r * Math.sin(k)]);
            return Math.hypot(x - c.x, y - c.y) / c.radius; }); });
        const g2 = m.balanced(new Float64Array(p.flat())); const moved = p.map((z) => m.apply(g2, z));
        return [arcs, rings, [0, 1].map((k) => moved.reduce((s, z) => s + z[k], 0) / p.length)]; }""",
        [p.tolist(), q.tolist(), t],
    )
    z = torch.tensor(arcs, dtype=torch.float64)
    ends = torch.from_numpy(p)[:, None], torch.from_numpy(q)[:, None]
    whole = poincare.dist(ends[0], ends[1], 1.0)
    parts = poincare.dist(ends[0], z, 1.0) + poincare.dist(z, ends[1], 1.0)
    torch.testing.assert_close(parts, whole.expand_as(parts), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z[:, 0], ends[0][:, 0])
    torch.testing.assert_close(z[:, -1], ends[1][:, 0])
    np.testing.assert_allclose(rings, 1.0, rtol=1e-9)
    assert np.hypot(*mean) < 1e-3


def test_points_at_the_rim_stay_finite(window: Any) -> None:
    worst = window.js(
        """() => { const m = leafward.mobius; let g = m.IDENTITY;
        for (let i = 0; i < 200; i++) g = m.compose(m.translation([0.9 * Math.cos(i / 50), 0.4 * Math.sin(i)]), g);
        const radii = [1 - 1e-7, 1 - 1e-12, 1 - 2 ** -53];
        const rim = radii.flatMap((r) => [[r, 0], [0, -r], [r * 0.6, r * 0.8], [-r, 0]]);
        const all = [g, m.inverse(g)].flatMap((h) => rim.map((z) => m.apply(h, z)));
        const pulled = rim.flatMap((z) => m.dragging(z, [0.1, 0.2]));
        const arcs = rim.map((p, i) => { const q = rim[(i + 1) % rim.length];
          return m.arcPoint(p, q, m.arcTurn(p, q), 0.5); });
        return { finite: [...g, ...pulled, ...all.flat(), ...arcs.flat()].every(Number.isFinite),
          out: Math.max(...arcs.map((z) => Math.hypot(...z))) }; }"""
    )
    assert worst["finite"]
    assert worst["out"] <= 1 + 1e-9


def test_card_draws_points_and_arcs_where_the_page_computes_them(window: Any, served: Any) -> None:
    """The shader's Möbius map and its arcs against the float64 map and `arcPoint`, read back as pixels."""
    kind, family = served.node("kind B"), served.node("family B2")
    got = window.js(
        """([kind, family]) => { const c = leafward.charts[0]; const m = leafward.mobius;
        c.camera.move(m.translation([-0.12, 0.1]));
        probe.chart();
        const [p, q] = [kind, family].map((id) => c.place(id));
        const along = Array.from({ length: 8 }, (_, i) => m.arcPoint(p, q, m.arcTurn(p, q), (i + 1) / 10));
        return { drift: c.camera.drift(c.base), point: probe.around(q), arc: along.map((z) => probe.around(z)),
          bend: m.arcTurn(p, q)[1], wanted: [...c.rgba.subarray(4 * family, 4 * family + 4)] }; }""",
        [kind, family],
    )
    assert got["drift"] > 0, "the card had no step to make"
    assert np.abs(np.array(got["point"]).reshape(9, 4)[4, :3] - got["wanted"][:3]).max() < 30
    assert abs(got["bend"]) > 0.05, "the arc is straight"
    assert np.array(got["arc"]).reshape(-1, 9, 4)[..., 3].max(axis=1).min() > 10


def test_lost_context_comes_back(window: Any) -> None:
    window.js(
        """() => new Promise((done) => { const c = leafward.charts[0];
        const lose = c.renderer.gl.getExtension('WEBGL_lose_context');
        c.layers[1].addEventListener('webglcontextrestored', () => setTimeout(done, 50), { once: true });
        lose.loseContext();
        setTimeout(() => lose.restoreContext(), 50); })"""
    )
    drawn = window.js("() => { probe.chart(); return probe.read().some((v) => v > 0); }")
    assert drawn


def test_names_never_overlap(window: Any) -> None:
    boxes = window.js(
        """() => { const c = leafward.charts[0]; const pen = document.createElement('canvas').getContext('2d');
        return c.labels.map(({ text, x, y, size }) => { pen.font = `${size}px system-ui`;
          return [x, y - size / 2, x + pen.measureText(text).width * 0.9, y + size / 2]; }); }"""
    )
    assert len(boxes) > 5
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]


def test_hundred_thousand_points_are_drawn(crowded: Any, record_property: Any) -> None:
    """Frames per second on this machine's renderer are recorded, not judged."""
    whole, coarse, picking, renderer, covered = crowded.js(
        """() => { const c = leafward.charts[0]; const { gl } = c.renderer;
        const [whole, coarse] = [leafward.fps(8), leafward.fps(8, 4)];
        const begin = performance.now();
        for (let i = 0; i < 20; i++) c.pick([200 + i, 300]);
        const picking = (performance.now() - begin) / 20;
        const kind = gl.getExtension('WEBGL_debug_renderer_info')?.UNMASKED_RENDERER_WEBGL ?? gl.RENDERER;
        probe.chart();
        const covered = probe.read().filter((v, i) => i % 4 === 3 && v > 0).length;
        return [whole, coarse, picking, gl.getParameter(kind), covered]; }"""
    )
    record_property("frames_per_second_100k", round(whole["rate"], 2))
    record_property("frames_per_second_100k_coarse", round(coarse["rate"], 2))
    record_property("script_milliseconds_100k", round(whole["script"], 2))
    record_property("renderer", renderer)
    print(
        f"100,000 points, 99,999 edges: {whole['rate']:.1f} frames/s, {coarse['rate']:.1f} at the coarsest, "
        f"{whole['script']:.2f} ms of script a frame, {picking:.2f} ms a pick, on {renderer}"
    )
    assert min(whole["rate"], coarse["rate"], whole["script"]) > 0
    assert covered > 5_000


def test_slow_frames_of_a_movement_are_drawn_coarser_until_it_ends(crowded: Any) -> None:
    got = crowded.js(
        """async () => { const c = leafward.charts[0]; const drawn = () => { c.stale = true; c.draw();
          return [c.coarse, c.renderer.count, c.renderer.lines.reduce((n, l) => n + l.count, 0)]; };
        c.needed = 0; c.last = undefined;
        const at = (took) => (now) => { c.took = took; c.pace(now); return drawn(); };
        const quick = [0, 16, 32, 300, 600].map(at(16)).at(-1);  // a hand that pauses is no slow machine
        const slow = [730, 860, 990, 1120].map(at(130)).at(-1);
        await new Promise((done) => setTimeout(done, 600));
        const rested = [c.coarse, c.renderer.count, c.renderer.lines.reduce((n, l) => n + l.count, 0)];
        const again = [5000, 5016].map(at(16)); clearTimeout(c.resting); c.needed = 0; c.detail(0); drawn();
        return { quick, slow, rested, again }; }"""
    )
    assert got["quick"][0] == got["rested"][0] == 0
    assert got["quick"] == got["rested"]
    assert got["slow"][0] == 4
    assert got["slow"][1] < got["quick"][1] / 4
    assert got["slow"][2] < got["quick"][2] / 4
    assert [each[0] for each in got["again"]] == [0, 4], "the next movement knows at once what this machine can do"


def test_a_frame_maps_no_point_that_it_does_not_name(crowded: Any) -> None:
    """Places of all points are mapped when they are asked for: small steps of the view do not ask."""
    got = crowded.js(
        """() => { const { mobius } = leafward; const c = probe.chart(); const pose = c.camera.pose;
        const before = c.mapped; c.camera.move(mobius.translation([0.002, 0.001])); c.stale = true; c.draw();
        const idle = c.mapped === before && c.mapped !== c.camera.pose;
        const names = c.labels.map(({ text }) => text); c.forget(); c.labels = []; c.stale = true; c.draw();
        const fresh = c.labels.map(({ text }) => text); const [x, y] = c.place(7);
        const off = Math.hypot(c.frame[14] - x, c.frame[15] - y); c.camera.pose = pose; probe.chart();
        return { idle, names, fresh, off }; }"""
    )
    assert got["idle"]
    assert len(set(got["names"]) & set(got["fresh"])) >= 0.8 * len(got["fresh"]) > 5
    assert got["off"] < 1e-12


def test_points_left_out_lie_under_others(crowded: Any) -> None:
    found = crowded.js(  # as one string: playwright is slow with long lists
        """() => { const { frame, crowd, scene } = probe.chart();
        const mask = Uint8Array.from({ length: scene.count }, (_, i) => (i % 7 === 0 ? 1 : 0));
        const [plain, masked] = [null, mask].map((m) => [...crowd.thin(frame, 0.002, m)]);
        return JSON.stringify([[...frame], [...mask], plain, masked]); }"""
    )
    frame, mask, plain, masked = json.loads(found)
    xy, wanted = np.array(frame).reshape(-1, 2), np.array(mask, bool)
    cells = np.floor(xy / 0.002 + 0.5).astype(np.int64)
    assert len(plain) == len(masked) == len(np.unique(cells, axis=0)) < len(xy) / 2
    assert len(np.unique(cells[plain], axis=0)) == len(plain)
    assert len(np.unique(cells[masked], axis=0)) == len(masked)
    assert wanted[masked].sum() == len(np.unique(cells[wanted], axis=0))


def test_deepest_leaf_is_drawn_at_the_centre_when_it_is_centred(crowded: Any) -> None:
    """Far from home the card's float32 would be pixels off if it had to make the whole way."""
    leaf = 99_999
    got = crowded.js(
        """(leaf) => { const c = leafward.charts[0]; const home = c.camera.pose; c.centre(leaf); probe.chart();
        const far = leafward.mobius.reach(c.camera.pose.isometry);
        c.camera.move(leafward.mobius.translation([0.1, 0.15])); probe.chart();
        const drift = c.camera.drift(c.base); const seen = probe.around(c.place(leaf)).slice(16, 19);
        c.camera.pose = home; return { far, drift, seen, wanted: [...c.rgba.subarray(4 * leaf, 4 * leaf + 3)] }; }""",
        leaf,
    )
    assert got["far"] > 7
    assert got["drift"] > 0.2, "the card had no step to make"
    assert np.abs(np.subtract(got["seen"], got["wanted"])).max() < 60
