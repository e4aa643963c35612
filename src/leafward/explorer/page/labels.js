// Which points get their name written beside them: the weighty ones near the centre, no two overlapping.

const MOST = 60;
const LONGEST = 28;

export const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1).trimEnd()}…` : text);

const roomAt = (x, y, curved) => (curved ? 1 - x * x - y * y : 1 / (1 + x * x + y * y));

/** The points worth naming until the view has moved by `slack` of what is in sight, best first, by index.
 *
 * `frame` holds mapped positions; what the disk shows small, at its rim, scores low. */
export function shortlist({ curved, half, unit, importance }, frame, mask, slack) {
  const found = [];
  let bar = 0;
  const [limitX, limitY] = half.map((pixels) => (1 + 2 * slack) * (pixels / unit));
  for (let i = 0; i < importance.length; i++) {
    const x = frame[2 * i];
    const y = frame[2 * i + 1];
    if (Math.abs(x) > limitX || Math.abs(y) > limitY || (mask && !mask[i])) continue;
    const score = roomAt(x, y, curved) * importance[i];
    if (score <= bar) continue;
    found.push({ id: i, score });
    if (found.length > 40 * MOST) {
      found.sort((a, b) => b.score - a.score);
      found.length = 10 * MOST;
      bar = found[found.length - 1].score;
    }
  }
  return found
    .sort((a, b) => b.score - a.score)
    .slice(0, 10 * MOST)
    .map(({ id }) => id);
}

/** Those of the shortlist that this frame can name, best first: [{id, x, y}].
 *
 * What was named in the last frame scores a little higher, so that names do not flicker while the view moves. */
function candidates({ place, curved, half, unit, importance, shown }, namable) {
  const found = [];
  for (const id of namable) {
    const [x, y] = place(id);
    if (Math.abs(x) > half[0] / unit || Math.abs(y) > half[1] / unit) continue;
    const room = roomAt(x, y, curved);
    if (room >= 0.08) found.push({ id, score: room * importance[id] * (shown.has(id) ? 1.2 : 1) });
  }
  return found
    .sort((a, b) => b.score - a.score)
    .slice(0, 4 * MOST)
    .map(({ id }) => id);
}

const overlaps = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** Labels to draw, in CSS pixels: [{id, text, x, y, size}], x at the left. `width(text, size)` measures a text.
 *
 * The ids in `first` come before all others; the first of them is named whatever lies there. */
export function placeLabels(view, namable, labels, first, width) {
  const { place, half, unit } = view;
  const most = first.length + Math.min(MOST, Math.round((half[0] * half[1]) / 4500));
  const marked = new Set(first);
  const boxes = [];
  const placed = [];
  for (const id of new Set([...first, ...candidates(view, namable)])) {
    if (placed.length >= most) break;
    const text = shortened(labels[id]);
    if (!text.trim()) continue;
    const [fx, fy] = place(id);
    const x = half[0] + fx * unit;
    const y = half[1] - fy * unit;
    const room = view.curved ? Math.max(0, 1 - fx * fx - fy * fy) : 0.6;
    const size = 11 + Math.round(6 * room * room) / 2; // few sizes: a canvas is slow to make a font of a new one
    const wide = width(text, size);
    const gap = marked.has(id) ? 11 : view.gap;
    // Outward from the middle, unless that would leave the picture.
    const before = x - gap - wide > 4 && (x < half[0] - 4 || x + gap + wide > 2 * half[0] - 4);
    const left = before ? x - gap - wide : x + gap;
    const box = { left: left - 2, right: left + wide + 2, top: y - size * 0.65, bottom: y + size * 0.65 };
    if (placed.length && boxes.some((other) => overlaps(box, other))) continue;
    boxes.push(box);
    placed.push({ id, text, x: left, y, size });
  }
  return placed;
}
