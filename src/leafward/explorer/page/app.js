// The explorer: which views are shown, what is selected, and who has to be told.

import { Chart } from "./chart.js";
import { STATIC, loadScene, neighbourFinder, thumbnail, viewLoader } from "./data.js";
import { pngOf, save, svgOf } from "./export.js";
import { Gestures } from "./gestures.js";
import * as mobius from "./mobius.js";
import { colouring } from "./palette.js";
import { Panel, byId, make, number, setPicture } from "./panel.js";
import { Search } from "./search.js";
import { Tree } from "./tree.js";

const DARK = window.matchMedia("(prefers-color-scheme: dark)");

/** The colours of the style sheet as the canvases need them. */
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const unit = (name) => [1, 3, 5].map((i) => parseInt(colour(name).slice(i, i + 2), 16) / 255);
  const names = ["stage", "disk", "ring", "rim", "ink", "accent"];
  const theme = Object.fromEntries(names.map((name) => [name, colour(name)]));
  const edge = [...unit("edge"), Number(colour("edge-strength"))];
  return { ...theme, diskRgb: unit("disk"), stageRgb: unit("stage"), edge, name: DARK.matches ? "dark" : "light" };
}

/** How points look in every view: painted from the deepest level up, larger and named sooner the more lies below. */
function castOf(scene, tree) {
  const { count, levels } = scene;
  const order = Uint32Array.from({ length: count }, (_, i) => i).sort((a, b) => levels[b] - levels[a] || a - b);
  const has = scene.edges.length > 0;
  const sizes = Float32Array.from(tree.weight, (w) => (has ? 0.8 + 0.24 * Math.log10(1 + w) : 1));
  const importance = Float32Array.from(tree.weight, (w) => (has ? 0.15 + Math.log(2 + w) / Math.log(2 + count) : 1));
  return { order, sizes, importance };
}

export class Explorer {
  constructor(scene) {
    this.scene = scene;
    this.tree = new Tree(scene.count, scene.edges);
    this.cast = castOf(scene, this.tree);
    this.load = viewLoader(scene);
    this.neighbours = neighbourFinder(scene);
    this.theme = readTheme();
    this.charts = [];
    this.state = {
      views: [scene.views[0].key],
      colour: this.modes()[0].key,
      selected: null,
      hover: null,
      kept: null,
      bin: null,
    };
    this.panel = new Panel(scene, {
      view: (key) => this.change([key, ...this.state.views.slice(1).filter((other) => other !== key)]),
      beside: (key) => this.change(key ? [this.state.views[0], key] : [this.state.views[0]]),
      colour: (key) => this.setColour(key),
      select: (id, options) => this.select(id, options),
      look: (id) => this.look(id),
      keep: (key) => this.keep({ kept: key }),
      keepBin: (bin) => this.keep({ bin }),
    });
    this.search = new Search(byId("query"), byId("found"), byId("count"), scene.labels, {
      found: (ids) => this.keep({ found: ids }),
      choose: (id) => this.select(id, { centre: true }),
    });
    this.listen();
  }

  /** What points can be coloured by. */
  modes() {
    const { levels, classNames } = this.scene;
    const all = [
      { key: "level", label: "Level" },
      { key: "class", label: "Class" },
      { key: "radius", label: "Radius" },
    ];
    const known = { level: levels.some((level) => level >= 0), class: classNames.length > 0, radius: true };
    return all.filter(({ key }) => known[key]);
  }

  listen() {
    byId("nearer").addEventListener("click", () => this.magnify(1.5));
    byId("further").addEventListener("click", () => this.magnify(1 / 1.5));
    byId("reset").addEventListener("click", () => this.charts.forEach((chart) => chart.goHome()));
    byId("html").download = `${this.fileName()}.html`;
    byId("png").addEventListener("click", async () => save(await this.png(), `${this.fileName()}.png`));
    byId("svg").addEventListener("click", () =>
      save(new Blob([this.svg()], { type: "image/svg+xml" }), `${this.fileName()}.svg`),
    );
    byId("html").hidden = STATIC;
    document.addEventListener("keydown", (event) => this.key(event));
    DARK.addEventListener("change", () => {
      this.theme = readTheme();
      this.charts.forEach((chart) => chart.setTheme(this.theme));
      this.paint();
    });
  }

  key(event) {
    if (event.key === "Escape") {
      this.search.clear();
      this.keep({ kept: null, bin: null, found: null });
      this.select(null);
    } else if (event.key === "/" && event.target !== byId("query")) {
      event.preventDefault();
      byId("query").select();
    }
  }

  magnify(factor) {
    for (const chart of this.charts) {
      chart.halt();
      chart.camera.magnify([0, 0], factor);
      chart.invalidate();
    }
  }

  view(key) {
    return this.scene.views.find((view) => view.key === key);
  }

  /** What a choice in the panel does; if the data do not come, the panel says so and shows what is still there. */
  change(keys) {
    return this.show(keys).catch((error) => {
      this.panel.views(...this.state.views.map((key) => this.view(key)));
      this.panel.trouble("views", error);
    });
  }

  /** Show one view, or two side by side. A chart whose view stays keeps its place. */
  async show(keys) {
    const views = keys.map((key) => this.view(key));
    this.asked = keys;
    const parts = await Promise.all(keys.map((key) => this.load(key)));
    if (this.asked !== keys) return; // another view was asked for meanwhile
    this.state.views = keys;
    this.radii = parts.map(({ radii }) => radii);
    while (this.charts.length > views.length) this.charts.pop().close();
    while (this.charts.length < views.length) this.charts.push(this.newChart());
    views.forEach((view, i) => {
      const chart = this.charts[i];
      chart.caption.hidden = views.length === 1;
      chart.caption.textContent = view.label;
      const what = `${view.label} view of ${number(this.scene.count)} points.`;
      const keys = "Arrow keys move, plus and minus magnify, Enter selects the point at the centre.";
      chart.host.setAttribute("aria-label", `${what} ${keys}`);
      if (chart.view !== view) chart.setView(view, parts[i]);
    });
    this.panel.views(views[0], views[1]);
    this.paint();
    await this.select(this.state.selected);
  }

  newChart() {
    const host = make("div", { class: "chart", tabindex: "0", role: "application" });
    byId("charts").append(host);
    const chart = new Chart(host, this.scene, this.cast, this.theme);
    chart.caption = make("p", { class: "caption" });
    host.append(chart.caption);
    new Gestures(chart, {
      pick: (id) => this.select(id),
      hover: (id, spot) => this.look(id, chart, spot),
      centre: (id) => this.charts.forEach((each) => each.centre(id)),
    });
    return chart;
  }

  setColour(mode) {
    this.state.colour = mode;
    this.state.kept = null;
    this.paint();
  }

  /** Let only some points stand out: a level or class, a bar of the histogram, what the search found. */
  keep(part) {
    Object.assign(this.state, part);
    this.paint();
  }

  mask(values) {
    const { kept, bin, found } = this.state;
    const { count } = this.scene;
    if (kept === null && bin === null && !found) return null;
    const mask = new Uint8Array(count).fill(1);
    if (kept !== null) for (let i = 0; i < count; i++) mask[i] &= values[i] === kept;
    if (bin !== null) for (let i = 0; i < count; i++) mask[i] &= this.panel.histogram.bins[i] === bin;
    if (found) {
      const named = new Set(found);
      for (let i = 0; i < count; i++) mask[i] &= named.has(i);
    }
    return mask;
  }

  /** Colours, legend and histogram. */
  paint() {
    const { scene, state, theme } = this;
    const colours = this.radii.map((radii) => colouring(state.colour, scene, radii, theme.name));
    this.showRadii();
    this.panel.colours(this.modes(), state.colour, colours[0].legend, state.kept);
    const mask = this.mask(colours[0].values);
    this.charts.forEach((chart, i) => chart.setColours(colours[i].of, mask));
  }

  showRadii() {
    const { views, selected, bin } = this.state;
    this.panel.histogram.show(this.radii[0], this.view(views[0]).radius_label, selected, bin);
  }

  async select(id, { centre = false } = {}) {
    const { scene, tree } = this;
    this.state.selected = id;
    const path = id === null ? [] : tree.path(id);
    if (id === null) this.panel.present(false);
    else
      this.panel.selection(id, {
        path,
        ancestors: tree.ancestors(id),
        children: tree.children(id).length,
        radius: this.radii[0][id],
      });
    this.showRadii();
    this.charts.forEach((chart) => chart.mark({ selected: id, path, neighbours: [] }));
    if (centre && id !== null) this.charts.forEach((chart) => chart.centre(id));
    if (id === null) return;
    byId("spoken").textContent = `${scene.labels[id]} selected`;
    await this.findNeighbours(id).catch((error) => this.panel.trouble("neighbours", error));
  }

  async findNeighbours(id) {
    const { views } = this.state;
    const found = await Promise.all(views.map((key) => this.neighbours(key, id)));
    if (this.state.selected !== id || this.state.views !== views) return; // the reader has moved on
    this.charts.forEach((chart, i) => chart.mark({ neighbours: found[i].map((n) => n.id) }));
    this.panel.neighbours(views.map((key, i) => ({ view: this.view(key), found: found[i] })));
  }

  /** Mark a point in every chart; name it beside the pointer where there is one. */
  look(id, chart, spot) {
    if (id !== this.state.hover) this.charts.forEach((each) => each.mark({ hover: id }));
    const tip = byId("tip");
    if (chart) chart.host.classList.toggle("pointing", id !== null);
    if (id === null || !chart) tip.hidden = true;
    else this.tip(tip, id, chart, spot, id !== this.state.hover);
    this.state.hover = id;
  }

  tip(tip, id, chart, [x, y], changed) {
    const { scene } = this;
    if (changed) {
      tip.querySelector("strong").textContent = scene.labels[id];
      const facts = [];
      if (scene.levels[id] >= 0) facts.push(`level ${scene.levels[id]}`);
      if (scene.classes[id] >= 0) facts.push(scene.classNames[scene.classes[id]]);
      tip.querySelector("span").textContent = facts.join(" · ");
      setPicture(tip.querySelector("img"), thumbnail(scene, id));
    }
    tip.hidden = false;
    const left = chart.host.offsetLeft + x;
    const top = chart.host.offsetTop + y;
    const { clientWidth: width, clientHeight: height } = byId("stage");
    tip.style.left = `${Math.max(4, left + 16 + tip.offsetWidth > width ? left - 16 - tip.offsetWidth : left + 16)}px`;
    tip.style.top = `${Math.max(4, top + 16 + tip.offsetHeight > height ? top - 16 - tip.offsetHeight : top + 16)}px`;
  }

  fileName() {
    return this.scene.title.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|-+$/g, "") || "leafward";
  }

  png() {
    return pngOf(this.charts);
  }

  svg() {
    return svgOf(this.charts);
  }

  /** Speed of the first chart while it moves: {rate, script}, with everything drawn or coarser. */
  fps(frames = 60, coarse = 0) {
    return this.charts[0].benchmark(frames, coarse);
  }
}

function refuse(heading, reason) {
  const message = byId("message");
  message.replaceChildren(make("div", {}, make("h2", {}, heading), make("p", {}, reason)));
  message.hidden = false;
}

async function start() {
  if (!document.createElement("canvas").getContext("webgl2")) {
    const reason = "This browser does not offer it, or has it switched off.";
    refuse("This page needs WebGL2", `${reason} Any current browser with graphics acceleration shows the map.`);
    throw new Error(`WebGL2: ${reason}`);
  }
  try {
    const scene = await loadScene();
    const explorer = new Explorer(scene);
    explorer.panel.heading();
    await explorer.show(explorer.state.views);
    Object.assign(window.leafward, {
      explorer,
      scene,
      state: explorer.state,
      charts: explorer.charts,
      fps: (frames, coarse) => explorer.fps(frames, coarse),
    });
  } catch (error) {
    refuse("The data could not be shown", error.message);
    throw error;
  }
}

window.leafward = { mobius };
window.leafward.ready = start();
window.leafward.ready.catch((error) => console.error(error));
