// Pictures of a chart: PNG at twice the pixels, and SVG with true arcs.

import { arcTurn } from "./mobius.js";
import { css } from "./palette.js";
import { FONT, ringCircles, toPixel } from "./paint.js";
import { svgElement } from "./histogram.js";

const round = (value) => Math.round(value * 100) / 100;
// XML 1.0 has no way to write control characters; lone surrogates are not characters at all.
const printable = (text) =>
  text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");

/** The three layers of each chart side by side on the page's background, at 2 pixels per CSS pixel. */
export async function pngOf(charts) {
  const picture = document.createElement("canvas");
  picture.width = 2 * charts.reduce((sum, chart) => sum + chart.width, 0);
  picture.height = 2 * Math.max(...charts.map((chart) => chart.height));
  const context = picture.getContext("2d");
  context.fillStyle = charts[0].theme.stage;
  context.fillRect(0, 0, picture.width, picture.height);
  let left = 0;
  for (const chart of charts) {
    const { ratio } = chart;
    chart.setPixels(2);
    chart.detail(0);
    chart.base = null; // what is worth drawing depends on the pixels
    chart.stale = true;
    chart.draw();
    for (const layer of chart.layers) context.drawImage(layer, left, 0);
    left += 2 * chart.width;
    chart.setPixels(ratio);
    chart.base = null;
    chart.invalidate();
  }
  return new Promise((resolve) => picture.toBlob(resolve, "image/png"));
}

/** Path data of the geodesic from p to q: a circle's arc that turns by 2φ, or a line where it is nearly straight. */
function arcPath(lens, p, q, curved) {
  const [x, y] = toPixel(lens, p).map(round);
  const [u, v] = toPixel(lens, q).map(round);
  const sine = curved ? arcTurn(p, q)[1] : 0;
  const radius = Math.hypot(u - x, v - y) / (2 * Math.abs(sine));
  if (!(radius < 1e5)) return `M${x} ${y}L${u} ${v}`;
  return `M${x} ${y}A${round(radius)} ${round(radius)} 0 0 ${sine > 0 ? 1 : 0} ${u} ${v}`;
}

const inside = (chart, [x, y]) => x > -20 && y > -20 && x < chart.width + 20 && y < chart.height + 20;

function groundOf(chart) {
  const { lens, theme, camera } = chart;
  const layer = svgElement("g", { fill: "none", stroke: theme.ring });
  const disc = ({ x, y, radius }, attributes) => {
    const [cx, cy] = toPixel(lens, [x, y]).map(round);
    return svgElement("circle", { cx, cy, r: round(radius * lens.unit), ...attributes });
  };
  if (camera.curved) layer.append(disc({ x: 0, y: 0, radius: 1 }, { fill: theme.disk, stroke: theme.rim }));
  layer.append(...ringCircles(camera, chart.farthest).map((ring) => disc(ring, {})));
  return layer;
}

/** Edges longer than half a pixel with an end in the picture, as one path. */
function edgesOf(chart) {
  const { lens, scene, camera, theme } = chart;
  const parts = [];
  for (let e = 0; e < scene.edges.length; e += 2) {
    const p = chart.place(scene.edges[e]);
    const q = chart.place(scene.edges[e + 1]);
    if (Math.hypot(q[0] - p[0], q[1] - p[1]) * lens.unit < 0.5) continue;
    if (!inside(chart, toPixel(lens, p)) && !inside(chart, toPixel(lens, q))) continue;
    parts.push(arcPath(lens, p, q, camera.curved));
  }
  const [r, g, b, alpha] = theme.edge;
  const stroke = css([r, g, b].map((v) => Math.round(255 * v)));
  return svgElement("path", {
    d: parts.join(""),
    fill: "none",
    stroke,
    "stroke-opacity": alpha,
    "stroke-width": chart.lineWidth,
  });
}

/** The points in the picture; of several on the same half pixel, the one on top. */
function pointsOf(chart) {
  const { lens, cast, rgba, camera } = chart;
  const layer = svgElement("g");
  for (const id of chart.crowd.thin(chart.frame, 0.5 / lens.unit, chart.mask)) {
    const z = chart.place(id);
    const [x, y] = toPixel(lens, z);
    if (!inside(chart, [x, y])) continue;
    const room = camera.curved ? Math.max(0, 1 - z[0] ** 2 - z[1] ** 2) : 1;
    const r = 0.5 * Math.max(chart.leastDiameter, chart.diameter * cast.sizes[id] * (0.4 + 0.6 * room));
    const [red, green, blue, alpha] = rgba.subarray(4 * id, 4 * id + 4);
    const place = { cx: round(x), cy: round(y), r: round(r), fill: css([red, green, blue]) };
    layer.append(svgElement("circle", alpha < 200 ? { ...place, "fill-opacity": round(alpha / 255) } : place));
  }
  return layer;
}

function marksOf(chart) {
  const { lens, marks, camera, theme } = chart;
  const layer = svgElement("g", { fill: "none" });
  const steps = marks.path
    .slice(1)
    .map((id, i) => arcPath(lens, chart.place(marks.path[i]), chart.place(id), camera.curved));
  layer.append(svgElement("path", { d: steps.join(""), stroke: theme.accent, "stroke-width": 2.25 }));
  const ring = (id, r, attributes) => {
    const [cx, cy] = toPixel(lens, chart.place(id)).map(round);
    layer.append(svgElement("circle", { cx, cy, r, ...attributes }));
  };
  for (const id of marks.path.slice(1)) ring(id, 4.5, { fill: theme.disk, stroke: theme.accent, "stroke-width": 2 });
  for (const id of marks.neighbours.filter((id) => !marks.path.includes(id)))
    ring(id, 5.5, { stroke: theme.ink, "stroke-width": 1.25 });
  if (marks.selected !== null) ring(marks.selected, 6.5, { fill: theme.accent, stroke: theme.disk, "stroke-width": 2 });
  return layer;
}

function namesOf(chart) {
  const { theme, marks, camera } = chart;
  const attributes = {
    "font-family": FONT,
    fill: theme.ink,
    stroke: camera.curved ? theme.disk : theme.stage,
    "stroke-width": 3.5,
  };
  const layer = svgElement("g", { ...attributes, "stroke-linejoin": "round", "paint-order": "stroke" });
  for (const { id, text, x, y, size } of chart.labels) {
    const weight = id === marks.selected ? { "font-weight": 600 } : {};
    const name = svgElement("text", {
      x: round(x),
      y: round(y),
      "font-size": round(size),
      "dominant-baseline": "central",
      ...weight,
    });
    name.textContent = printable(text);
    layer.append(name);
  }
  return layer;
}

/** The charts as one SVG document; the serialiser escapes every name. */
export function svgOf(charts) {
  const width = charts.reduce((sum, chart) => sum + chart.width, 0);
  const height = Math.max(...charts.map((chart) => chart.height));
  const picture = svgElement("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  picture.append(svgElement("rect", { width, height, fill: charts[0].theme.stage }));
  let left = 0;
  for (const chart of charts) {
    if (chart.stale) chart.draw();
    const part = svgElement("svg", { x: left, width: chart.width, height: chart.height, overflow: "hidden" });
    part.append(groundOf(chart), edgesOf(chart), pointsOf(chart), marksOf(chart), namesOf(chart));
    picture.append(part);
    left += chart.width;
  }
  return new XMLSerializer().serializeToString(picture);
}

/** Offer a blob for saving. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
