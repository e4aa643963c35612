// The Poincaré disk and its isometries.
//
// A point is [x, y] with x² + y² < 1. An isometry is a pair (a, b) of complex numbers with |a|² − |b|² = 1, kept as
// [ar, ai, br, bi]; it acts as z ↦ (a z + b) / (b̄ z + ā). All in float64; the graphics card only sees small steps.

export const IDENTITY = Object.freeze([1, 0, 0, 0]);

// 2·asinh(1e6) ≈ 29: at this distance from home rounding moves a point by 1e-4 of the disk, further out by more.
const FARTHEST = 1e6;
const TINY = 1e-300; // in place of a denominator that has rounded to 0

/** The pair rescaled so that |a|² − |b|² = 1 holds again after rounding. */
export function renormalised([ar, ai, br, bi]) {
  const length = Math.hypot(br, bi);
  const shrink = Math.min(1, FARTHEST / length); // Infinity for b = 0
  const grow = Math.sqrt(1 + (length * shrink) ** 2) / Math.hypot(ar, ai);
  return [ar * grow, ai * grow, br * shrink, bi * shrink];
}

/** g after h. */
export function compose([a, A, b, B], [c, C, d, D]) {
  return renormalised([
    a * c - A * C + b * d + B * D,
    a * C + A * c + B * d - b * D,
    a * d - A * D + b * c + B * C,
    a * D + A * d + B * c - b * C,
  ]);
}

export function inverse([ar, ai, br, bi]) {
  return [ar, -ai, -br, -bi];
}

/** The isometry as a complex 2×2 matrix [A, B, C, D], eight numbers: z ↦ (A z + B) / (C z + D). */
export function matrixOf([ar, ai, br, bi]) {
  return [ar, ai, br, bi, br, -bi, ar, -ai];
}

/** One point under a complex 2×2 matrix. */
export function transform([ar, ai, br, bi, cr, ci, dr, di], [x, y]) {
  const nx = ar * x - ai * y + br;
  const ny = ar * y + ai * x + bi;
  const mx = cr * x - ci * y + dr;
  const my = cr * y + ci * x + di;
  const norm = mx * mx + my * my + TINY;
  return [(nx * mx + ny * my) / norm, (ny * mx - nx * my) / norm];
}

export function apply(isometry, point) {
  return transform(matrixOf(isometry), point);
}

/** Every point of `xy` (x₀, y₀, x₁, y₁, …) under a complex 2×2 matrix, into `out`. */
export function transformAll([ar, ai, br, bi, cr, ci, dr, di], xy, out) {
  for (let i = 0; i < xy.length; i += 2) {
    const x = xy[i];
    const y = xy[i + 1];
    const nx = ar * x - ai * y + br;
    const ny = ar * y + ai * x + bi;
    const mx = cr * x - ci * y + dr;
    const my = cr * y + ci * x + di;
    const norm = 1 / (mx * mx + my * my + TINY);
    out[i] = (nx * mx + ny * my) * norm;
    out[i + 1] = (ny * mx - nx * my) * norm;
  }
  return out;
}

/** Hyperbolic distance at curvature −1. */
export function distance([x, y], [u, v]) {
  const room = (1 - Math.hypot(x, y)) * (1 + Math.hypot(x, y)) * (1 - Math.hypot(u, v)) * (1 + Math.hypot(u, v));
  return 2 * Math.asinh(Math.hypot(x - u, y - v) / Math.sqrt(room));
}

/** Distance by which an isometry moves the centre of the disk. */
export function reach([, , br, bi]) {
  return 2 * Math.asinh(Math.hypot(br, bi));
}

/** Translation that takes the centre of the disk to [x, y]. */
export function translation([x, y]) {
  const length = Math.hypot(x, y);
  const a = 1 / Math.sqrt(Math.max((1 - length) * (1 + length), FARTHEST ** -2));
  return [a, 0, x * a, y * a];
}

/** Translation by a hyperbolic distance in the direction of [x, y], along the diameter. */
export function translationAlong([x, y], length) {
  const norm = Math.hypot(x, y);
  if (norm === 0) return IDENTITY;
  const b = Math.sinh(length / 2) / norm;
  return [Math.cosh(length / 2), 0, x * b, y * b];
}

/** The one translation along a diameter that takes p to q: what a drag from p to q does.
 *
 * (p + b) / (1 + b̄ p) = q is linear in b and b̄; with d = q − p and k = p q its solution is
 * b = (d + k d̄) / (1 − |k|²), inside the disk whenever p and q are. */
export function dragging([px, py], [qx, qy]) {
  const dx = qx - px;
  const dy = qy - py;
  const kx = px * qx - py * qy;
  const ky = px * qy + py * qx;
  const room = 1 - kx * kx - ky * ky;
  return translation([(dx + kx * dx + ky * dy) / room, (dy + ky * dx - kx * dy) / room]);
}

/** [cos φ, sin φ] of the geodesic arc from p to q, which sweeps the angle 2φ of its circle.
 *
 * The geodesic is z(t) = (p (1 − t) + q e t) / ((1 − t) + e t), 0 ≤ t ≤ 1, with e = e^{iφ} the direction of 1 − p q̄:
 * exact at both ends, even in t on the screen, and the denominator cannot vanish because |φ| < π/2. */
export function arcTurn([px, py], [qx, qy]) {
  const x = 1 - px * qx - py * qy;
  const y = px * qy - py * qx;
  const norm = Math.hypot(x, y);
  return norm > 1e-12 ? [x / norm, y / norm] : [1, 0];
}

/** The point at t of the geodesic from p to q. */
export function arcPoint([px, py], [qx, qy], [ex, ey], t) {
  const s = 1 - t;
  const mx = s + ex * t;
  const my = ey * t;
  const nx = px * s + (qx * ex - qy * ey) * t;
  const ny = py * s + (qx * ey + qy * ex) * t;
  const norm = mx * mx + my * my;
  return [(nx * mx + ny * my) / norm, (ny * mx - nx * my) / norm];
}

/** Image of the circle |z| = r: {x, y, radius} of the Euclidean circle that the isometry makes of it. */
export function circleImage(isometry, r) {
  const [ar, ai, br, bi] = isometry;
  // The diameter of the image lies on the line through 0 and the image of 0; its ends come from the direction of b / a.
  const along = [br * ar + bi * ai, bi * ar - br * ai];
  const norm = Math.hypot(...along);
  const u = norm > 0 ? [(along[0] / norm) * r, (along[1] / norm) * r] : [r, 0];
  const [x, y] = apply(isometry, u);
  const [v, w] = apply(isometry, [-u[0], -u[1]]);
  return { x: (x + v) / 2, y: (y + w) / 2, radius: Math.hypot(x - v, y - w) / 2 };
}

/** The isometry after which the points' mean in the disk is 0 (their conformal barycentre comes to the centre). */
export function balanced(xy) {
  const moved = new Float64Array(xy.length);
  let isometry = IDENTITY;
  for (let round = 0; round < 40; round++) {
    transformAll(matrixOf(isometry), xy, moved);
    let x = 0;
    let y = 0;
    for (let i = 0; i < moved.length; i += 2) {
      x += moved[i];
      y += moved[i + 1];
    }
    const mean = [(-2 * x) / xy.length, (-2 * y) / xy.length];
    if (Math.hypot(...mean) < 1e-3) break;
    isometry = compose(translation(mean), isometry);
  }
  return isometry;
}
