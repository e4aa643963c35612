// Which points get their name written beside them: the weighty ones near the centre, no two overlapping.

const MOST = 60;
const LONGEST = 28;

export const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1).trimEnd()}…` : text);

/** The candidates of a frame, best first, by index.
 *
 * `frame` holds mapped positions; what the disk shows small, at its rim, scores low, and what was named in the last
 * frame scores a little higher, so that names do not flicker while the view moves. */
function candidates({ frame, curved, half, unit, importance, shown, mask }) {
  const found = [];
  let bar = 0;
  const limitX = half[0] / unit;
  const limitY = half[1] / unit;
  for (let i = 0; i < importance.length; i++) {
    const x = frame[2 * i];
    const y = frame[2 * i + 1];
    if (Math.abs(x) > limitX || Math.abs(y) > limitY || (mask && !mask[i])) continue;
    const room = curved ? 1 - x * x - y * y : 1 / (1 + x * x + y * y);
    if (room < 0.08) continue;
    const score = room * importance[i] * (shown.has(i) ? 1.2 : 1);
    if (score <= bar) continue;
    found.push({ id: i, score });
    if (found.length > 40 * MOST) {
      found.sort((a, b) => b.score - a.score);
      found.length = 4 * MOST;
      bar = found[found.length - 1].score;
    }
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
export function placeLabels(view, labels, first, width) {
  const { frame, half, unit } = view;
  const most = first.length + Math.min(MOST, Math.round((half[0] * half[1]) / 4500));
  const marked = new Set(first);
  const boxes = [];
  const placed = [];
  for (const id of new Set([...first, ...candidates(view)])) {
    if (placed.length >= most) break;
    const text = shortened(labels[id]);
    if (!text.trim()) continue;
    const fx = frame[2 * id];
    const fy = frame[2 * id + 1];
    const x = half[0] + fx * unit;
    const y = half[1] - fy * unit;
    const room = view.curved ? Math.max(0, 1 - fx * fx - fy * fy) : 0.6;
    const size = 11 + 3 * room * room;
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
