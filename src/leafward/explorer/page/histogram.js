// How the radii of a view are spread: bars in SVG that can be pressed or walked with the arrow keys, and a line at the
// selected point.

const BINS = 32;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 84;

export function svgElement(name, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Counts in equal bins between the least and the greatest radius, and the bin of every point. */
export function binned(radii) {
  let low = Infinity;
  let high = -Infinity;
  for (const r of radii) {
    low = Math.min(low, r);
    high = Math.max(high, r);
  }
  const counts = new Array(BINS).fill(0);
  const bins = new Uint8Array(radii.length);
  radii.forEach((r, i) => {
    bins[i] = high > low ? Math.min(BINS - 1, Math.floor(((r - low) / (high - low)) * BINS)) : 0;
    counts[bins[i]]++;
  });
  return { low, high, counts, bins };
}

export const short = (value) =>
  Math.abs(value) >= 1e-3 || value === 0 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);

export class Histogram {
  /** `choose(bin | null)` is told which bar was chosen. */
  constructor(host, choose) {
    this.choose = choose;
    this.picture = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, tabindex: 0, role: "group" });
    this.picture.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      choose(this.chosen === null ? (step > 0 ? 0 : BINS - 1) : (this.chosen + step + BINS) % BINS);
    });
    host.append(this.picture);
  }

  show(radii, label, selected, chosen) {
    if (radii !== this.radii) Object.assign(this, { radii, ...binned(radii) });
    this.chosen = chosen;
    const most = Math.max(...this.counts);
    const parts = this.counts.map((count, bin) => this.bar(count, bin, most));
    if (selected !== null) {
      const share = this.high > this.low ? (radii[selected] - this.low) / (this.high - this.low) : 0;
      const x = Math.min(WIDTH - 1, Math.max(1, share * WIDTH));
      parts.push(svgElement("line", { x1: x, x2: x, y1: 0, y2: HEIGHT, class: "needle" }));
    }
    for (const [x, anchor, text] of [
      [0, "start", short(this.low)],
      [WIDTH / 2, "middle", label],
      [WIDTH, "end", short(this.high)],
    ]) {
      const caption = svgElement("text", { x, y: HEIGHT + 14, "text-anchor": anchor });
      caption.textContent = text;
      parts.push(caption);
    }
    this.picture.setAttribute("aria-label", `Histogram, ${label}${chosen === null ? "" : `: ${this.range(chosen)}`}`);
    this.picture.replaceChildren(...parts);
  }

  /** A bar in words. */
  range(bin) {
    const [from, to] = [bin, bin + 1].map((i) => short(this.low + ((this.high - this.low) * i) / BINS));
    return `${from} to ${to}: ${this.counts[bin].toLocaleString("en")}`;
  }

  bar(count, bin, most) {
    const step = WIDTH / BINS;
    const height = count ? Math.max(1.5, (count / most) * (HEIGHT - 4)) : 0;
    const bar = svgElement("g", { class: this.chosen === bin ? "bar chosen" : "bar" });
    const title = svgElement("title");
    title.textContent = this.range(bin);
    bar.append(title, svgElement("rect", { x: bin * step, width: step, y: 0, height: HEIGHT, class: "hit" }));
    bar.append(
      svgElement("rect", { x: bin * step + 0.75, width: step - 1.5, y: HEIGHT - height, height, rx: 1, class: "fill" }),
    );
    bar.addEventListener("click", () => this.choose(this.chosen === bin ? null : bin));
    return bar;
  }
}
