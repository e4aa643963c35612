// The taxonomy over the points, as parents and children by index.

/** Rows of a compressed adjacency list: the `to` of every edge that leaves `from`. */
function adjacency(count, edges, from, to) {
  const start = new Int32Array(count + 1);
  for (let e = from; e < edges.length; e += 2) start[edges[e] + 1]++;
  for (let i = 0; i < count; i++) start[i + 1] += start[i];
  const rows = new Int32Array(edges.length / 2);
  const next = start.slice(0, count);
  for (let e = 0; e < edges.length; e += 2) rows[next[edges[e + from]]++] = edges[e + to];
  return (i) => rows.subarray(start[i], start[i + 1]);
}

export class Tree {
  constructor(count, edges) {
    this.children = adjacency(count, edges, 0, 1);
    this.parents = adjacency(count, edges, 1, 0);
    this.weight = this.descendantCounts(count);
  }

  /** Number of nodes below each node, by way of first parents (exact in a tree, a fair size in a graph). */
  descendantCounts(count) {
    const weight = new Int32Array(count);
    const waiting = new Int32Array(count);
    for (let i = 0; i < count; i++) {
      for (const child of this.children(i)) if (this.parents(child)[0] === i) waiting[i]++;
    }
    const ready = [];
    for (let i = 0; i < count; i++) if (waiting[i] === 0) ready.push(i);
    while (ready.length) {
      const node = ready.pop();
      const parent = this.parents(node)[0];
      if (parent === undefined) continue;
      weight[parent] += weight[node] + 1;
      if (--waiting[parent] === 0) ready.push(parent);
    }
    return weight;
  }

  /** The way from a node up to a root by first parents, the node first: the way that the edges are drawn. */
  path(node) {
    const path = [];
    for (let step = node; step !== undefined; step = this.parents(step)[0]) path.push(step);
    return path;
  }

  /** Every proper ancestor, nearest first. */
  ancestors(node) {
    const seen = new Set([node]);
    for (const step of seen) for (const parent of this.parents(step)) seen.add(parent); // the set grows as it is read
    seen.delete(node);
    return [...seen];
  }
}
