// Colours that hold up for colour-blind readers: viridis for order (its lightness rises throughout), the eight hues of
// Okabe and Ito for classes, both trimmed so that no end sinks into the background.

const VIRIDIS = [
  "#440154",
  "#482878",
  "#3e4a89",
  "#31688e",
  "#26828e",
  "#1f9e89",
  "#35b779",
  "#6ece58",
  "#b5de2b",
  "#fde725",
];
const HUES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#c0609a", "#d18a00", "#3f9fd8", "#9c8f00", "#5f6670"],
  dark: ["#4da3e0", "#f07f38", "#2fc49a", "#e39ac4", "#f2b134", "#83cdf7", "#e8dc55", "#a9b0ba"],
};
const UNKNOWN = { light: [150, 154, 160], dark: [110, 116, 124] };

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const mix = (p, q, t) => p.map((v, i) => Math.round(v + (q[i] - v) * t));
export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Colour at t in [0, 1]: dark to light on a light page, light to dark on a dark one, so that low values stand out. */
export function ramp(theme, t) {
  const share = theme === "light" ? 0.82 * t : 1 - 0.62 * t;
  const at = Math.min(share, 0.99999) * (VIRIDIS.length - 1);
  const i = Math.floor(at);
  return mix(rgb(VIRIDIS[i]), rgb(VIRIDIS[i + 1]), at - i);
}

/** Colour of a class: eight hues, then the same hues paler and deeper, then from the start. */
function hue(theme, index) {
  const colour = rgb(HUES[theme][index % 8]);
  const round = Math.floor(index / 8) % 3;
  return round === 0 ? colour : mix(colour, round === 1 ? [255, 255, 255] : [0, 0, 0], 0.38);
}

function counts(values, size) {
  const count = new Array(size).fill(0);
  for (const value of values) if (value >= 0) count[value]++;
  return count;
}

const sampled = (values) => {
  const sorted = Float32Array.from(values).sort();
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return { low: at(0.01), high: at(0.99) };
};

/** How points are coloured: `of(i)` gives the colour of point i, `legend` what the panel says about it. */
export function colouring(mode, scene, radii, theme) {
  if (mode === "level") {
    const most = scene.levels.reduce((a, b) => Math.max(a, b), 0);
    const table = Array.from({ length: most + 1 }, (_, level) => ramp(theme, most ? level / most : 0));
    const items = counts(scene.levels, most + 1).map((count, key) => ({
      key,
      count,
      name: `Level ${key}`,
      colour: table[key],
    }));
    return {
      of: (i) => table[scene.levels[i]] ?? UNKNOWN[theme],
      values: scene.levels,
      legend: { items: items.filter((e) => e.count) },
    };
  }
  if (mode === "class") {
    const count = counts(scene.classes, scene.classNames.length);
    // The largest classes get the most distinct colours.
    const largest = count.map((_, key) => key).sort((a, b) => count[b] - count[a] || a - b);
    const items = largest.map((key, rank) => {
      return { key, count: count[key], name: scene.classNames[key], colour: hue(theme, rank) };
    });
    const table = [];
    for (const { key, colour } of items) table[key] = colour;
    return { of: (i) => table[scene.classes[i]] ?? UNKNOWN[theme], values: scene.classes, legend: { items } };
  }
  const { low, high } = sampled(radii);
  const share = (r) => (high > low ? Math.min(1, Math.max(0, (r - low) / (high - low))) : 0);
  const table = Array.from({ length: 256 }, (_, i) => ramp(theme, i / 255));
  return { of: (i) => table[Math.round(255 * share(radii[i]))], values: null, legend: { low, high, stops: table } };
}
