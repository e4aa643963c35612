// How much of each taxonomy edge a frame needs: nothing, a straight piece, or a curve of few or many segments.

export const ROW = 2048; // edges in a row of the texture that holds them
export const SEGMENTS = [1, 6, 20];

const INVISIBLE = 2.5; // pixels of length: shorter edges hide under the points at their ends
const RISES = [0.35, 6]; // pixels between an arc and its chord up to which 1 and 6 segments will do

export class EdgeSorter {
  /** `edges` is parent, child, parent, child, … by index of the points. */
  constructor(edges) {
    this.edges = edges;
    const room = 4 * ROW * Math.ceil(edges.length / 2 / ROW);
    this.sorted = SEGMENTS.map(() => ({ count: 0, ends: new Float32Array(room) }));
  }

  /** The edges worth drawing while none is longer than `pixels` times its length in `frame`: {count, ends} by kind.
   * `left` times as long ones are left out, and `left` times as high arcs are straight. */
  sort(frame, pixels, hyperbolic, left = 1) {
    const { edges, sorted } = this;
    for (const kind of sorted) kind.count = 0;
    for (let e = 0; e < edges.length; e += 2) {
      const px = frame[2 * edges[e]];
      const py = frame[2 * edges[e] + 1];
      const qx = frame[2 * edges[e + 1]];
      const qy = frame[2 * edges[e + 1] + 1];
      const chord = pixels * Math.sqrt((qx - px) ** 2 + (qy - py) ** 2);
      if (chord < left * INVISIBLE) continue;
      // The arc turns by 2φ, φ = arg(1 − p q̄), and rises chord / 2 · tan(φ / 2) above its chord.
      const x = 1 - px * qx - py * qy;
      const y = px * qy - py * qx;
      const rise = hyperbolic ? (0.5 * chord * Math.abs(y)) / (Math.sqrt(x * x + y * y) + x) : 0;
      const kind = sorted[rise < left * RISES[0] ? 0 : rise < left * RISES[1] ? 1 : 2];
      const at = 4 * kind.count++;
      kind.ends[at] = px;
      kind.ends[at + 1] = py;
      kind.ends[at + 2] = qx;
      kind.ends[at + 3] = qy;
    }
    return sorted;
  }
}
