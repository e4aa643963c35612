// Of many points on the same spot only the one on top need be drawn.

const SPAN = 2 ** 25; // cells are numbered from −SPAN to SPAN either way, so that a pair fits a float64

export class Crowd {
  /** `order` lists the points in the order in which they are painted. */
  constructor(order) {
    this.order = order;
    this.kept = new Uint8Array(order.length);
    this.drawn = new Uint32Array(order.length);
    this.taken = new Float64Array(2 ** Math.ceil(Math.log2(2 * order.length + 2))); // a hash table of taken cells
  }

  /** The points to draw, in order: of each square cell of the frame the last one painted, one of `mask` if there is. */
  thin(frame, cell, mask) {
    const { order, kept, drawn } = this;
    this.taken.fill(-1);
    kept.fill(0);
    for (const wanted of mask ? [1, 0] : [1]) {
      for (let k = order.length - 1; k >= 0; k--) {
        const id = order[k];
        if (mask && mask[id] !== wanted) continue;
        kept[id] = this.take(Math.round(frame[2 * id] / cell), Math.round(frame[2 * id + 1] / cell)) ? 1 : 0;
      }
    }
    let count = 0;
    for (const id of order) if (kept[id]) drawn[count++] = id;
    return drawn.subarray(0, count);
  }

  /** Take a cell; false where it is taken. */
  take(x, y) {
    const { taken } = this;
    const column = Math.max(-SPAN, Math.min(SPAN - 1, x));
    const row = Math.max(-SPAN, Math.min(SPAN - 1, y));
    const key = (row + SPAN) * 2 * SPAN + column + SPAN;
    let at = (Math.imul(column, 73856093) ^ Math.imul(row, 19349663)) & (taken.length - 1);
    for (; taken[at] !== -1; at = (at + 1) & (taken.length - 1)) if (taken[at] === key) return false;
    taken[at] = key;
    return true;
  }
}
