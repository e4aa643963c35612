// What is drawn around the points on plain 2D canvases: the disk and its rings below, marks and names above.
// Everything is in CSS pixels; a `lens` is {half: [w/2, h/2], unit: pixels per unit of the magnified frame}.

import { arcPoint, arcTurn, circleImage } from "./mobius.js";

export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
const ARC_STEPS = 32;

export const toPixel = ({ half, unit }, [x, y]) => [half[0] + x * unit, half[1] - y * unit];

/** Radii of the rings around home: at most eight, at round hyperbolic distances (or norms, in a plane). */
export function ringRadii(farthest) {
  const step = [0.25, 0.5, 1, 2, 4, 8].find((s) => farthest / s <= 8) ?? 16;
  return Array.from({ length: Math.floor(farthest / step) }, (_, i) => (i + 1) * step);
}

/** Circles in the frame that show equal distance from home: [{x, y, radius}]. */
export function ringCircles(camera, farthest) {
  if (camera.curved) return ringRadii(farthest).map((r) => circleImage(camera.pose.isometry, Math.tanh(r / 2)));
  const { scale, offset } = camera.pose;
  return [0.25, 0.5, 0.75, 1].map((r) => ({ x: offset[0], y: offset[1], radius: r * scale }));
}

function circle(context, lens, { x, y, radius }) {
  context.beginPath();
  context.arc(...toPixel(lens, [x, y]), radius * lens.unit, 0, 2 * Math.PI);
}

export function paintGround(context, lens, camera, farthest, theme) {
  if (camera.curved) {
    circle(context, lens, { x: 0, y: 0, radius: 1 });
    context.fillStyle = theme.disk;
    context.fill();
  }
  context.lineWidth = 1;
  context.strokeStyle = theme.ring;
  for (const ring of ringCircles(camera, farthest)) {
    if (ring.radius * lens.unit < 2) continue;
    circle(context, lens, ring);
    context.stroke();
  }
  if (camera.curved) {
    circle(context, lens, { x: 0, y: 0, radius: 1 });
    context.lineWidth = 1.25;
    context.strokeStyle = theme.rim;
    context.stroke();
  }
}

/** Points along the geodesic (or the straight line, in a plane) between two points of the frame. */
export function arcPoints(p, q, curved) {
  if (!curved) return [p, q];
  const turn = arcTurn(p, q);
  return Array.from({ length: ARC_STEPS + 1 }, (_, i) => arcPoint(p, q, turn, i / ARC_STEPS));
}

function strokeArc(context, lens, p, q, curved) {
  context.beginPath();
  for (const z of arcPoints(p, q, curved)) context.lineTo(...toPixel(lens, z));
  context.stroke();
}

function dot(context, lens, at, radius, fill, stroke, width) {
  context.beginPath();
  context.arc(...toPixel(lens, at), radius, 0, 2 * Math.PI);
  if (fill) {
    context.fillStyle = fill;
    context.fill();
  }
  context.strokeStyle = stroke;
  context.lineWidth = width;
  context.stroke();
}

/** Path to the root, neighbours, the selected point, the one under the pointer. `at(id)` is a place in the frame. */
export function paintMarks(context, lens, { selected, hover, path, neighbours }, at, curved, theme) {
  context.lineCap = "round";
  for (const [stroke, width] of [
    [theme.disk, 5],
    [theme.accent, 2.25],
  ]) {
    context.strokeStyle = stroke;
    context.lineWidth = width;
    for (let i = 1; i < path.length; i++) strokeArc(context, lens, at(path[i - 1]), at(path[i]), curved);
  }
  for (const id of path.slice(1)) dot(context, lens, at(id), 4.5, theme.disk, theme.accent, 2);
  for (const id of neighbours.filter((id) => !path.includes(id)))
    dot(context, lens, at(id), 5.5, null, theme.ink, 1.25);
  if (selected !== null) dot(context, lens, at(selected), 6.5, theme.accent, theme.disk, 2);
  if (hover !== null && hover !== selected) dot(context, lens, at(hover), 7.5, null, theme.accent, 2);
}

/** Names with a rim of the background around each letter; the selected one in bold. */
export function paintLabels(context, labels, selected, halo, ink) {
  context.textBaseline = "middle";
  context.lineJoin = "round";
  context.lineWidth = 3.5;
  context.strokeStyle = halo;
  context.fillStyle = ink;
  for (const { id, text, x, y, size } of labels) {
    context.font = `${id === selected ? 600 : 400} ${size}px ${FONT}`;
    context.strokeText(text, x, y);
    context.fillText(text, x, y);
  }
}
