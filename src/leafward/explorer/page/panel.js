// The side panel: what is selected, which views are shown, what the colours mean. Text only ever goes in as text.

import { Histogram, short } from "./histogram.js";
import { css } from "./palette.js";
import { thumbnail } from "./data.js";

const LISTED = 10;

export const byId = (id) => document.getElementById(id);
export const number = (value) => value.toLocaleString("en");

/** An element with attributes (a null one is left out) and children (strings become text). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** New children for an element; the focus stays on the control at the same place. */
function refill(host, ...children) {
  const controls = () => [...host.querySelectorAll("button, input")];
  const at = controls().indexOf(document.activeElement);
  host.replaceChildren(...children);
  if (at >= 0) controls()[at]?.focus();
}

/** A row of radio buttons; `choose(key)` is called on a change. */
function segments(host, name, options, current, choose) {
  const labels = options.map(({ key, label }) => {
    const input = make("input", { type: "radio", name, value: key });
    input.checked = key === current;
    input.addEventListener("change", () => choose(key));
    return make("label", { title: label }, input, make("span", {}, label));
  });
  refill(host, ...labels);
}

/** Show an image once it has come; none where there is no address or nothing at it. */
export function setPicture(image, address) {
  image.hidden = true;
  if (!address) {
    image.removeAttribute("src");
    return;
  }
  image.onload = () => (image.hidden = false);
  image.src = address;
}

export class Panel {
  /** `act` holds what the panel can ask for: view, beside, colour, select, look, keep, keepBin. */
  constructor(scene, act) {
    this.scene = scene;
    this.act = act;
    this.histogram = new Histogram(byId("histogram"), act.keepBin);
    byId("clear").addEventListener("click", () => act.select(null));
    this.sheet();
  }

  /** On a phone the panel opens and closes by its grip. */
  sheet() {
    const grip = byId("grip");
    grip.addEventListener("click", () => this.open(!byId("panel").classList.contains("open")));
    let from = null;
    grip.addEventListener("pointerdown", (event) => (from = event.clientY));
    grip.addEventListener("pointermove", (event) => {
      if (from === null || Math.abs(event.clientY - from) < 24) return;
      this.open(event.clientY < from);
      from = null;
    });
  }

  open(open) {
    byId("panel").classList.toggle("open", open);
    byId("grip").setAttribute("aria-expanded", String(open));
  }

  heading() {
    const { scene } = this;
    const parts = [`${number(scene.count)} points`];
    if (scene.edges.length) parts.push(`${number(scene.edges.length / 2)} edges`);
    document.title = `${scene.title} · leafward explorer`;
    document.querySelector("#heading h1").textContent = scene.title;
    document.querySelector("#heading p").textContent = parts.join(" · ");
  }

  views(shown, beside) {
    const { views } = this.scene;
    const [host] = document.querySelectorAll("#views .segments");
    host.hidden = views.length < 2;
    segments(host, "view", views, shown.key, this.act.view);
    byId("beside").hidden = views.length < 2;
    const select = document.querySelector("#beside select");
    const others = views.filter((view) => view !== shown);
    select.replaceChildren(
      make("option", { value: "" }, "Nothing"),
      ...others.map((v) => make("option", { value: v.key }, v.label)),
    );
    select.value = beside?.key ?? "";
    select.onchange = () => this.act.beside(select.value || null);
    document.querySelectorAll("#views .trouble").forEach((old) => old.remove());
    const on = [shown, beside].filter(Boolean);
    document.querySelector("#views .method").replaceChildren(...on.map((view) => make("p", {}, described(view))));
  }

  colours(modes, mode, legend, kept) {
    segments(document.querySelector("#colours .segments"), "colour", modes, mode, this.act.colour);
    refill(byId("legend"), ...(legend.items ? this.swatches(legend.items, kept) : gradient(legend)));
  }

  swatches(items, kept) {
    const rows = items.slice(0, LISTED).map(({ key, name, count, colour }) => {
      const button = row(name, number(count), css(colour));
      button.setAttribute("aria-pressed", String(key === kept));
      button.title = "Show these alone";
      button.addEventListener("click", () => this.act.keep(key === kept ? null : key));
      return make("li", {}, button);
    });
    const rest = items.length - LISTED;
    const list = make("ul", { class: "items" }, ...rows);
    return rest > 0
      ? [list, make("p", {}, `and ${number(rest)} more${items.length > 24 ? "; colours repeat" : ""}`)]
      : [list];
  }

  /** Show the selection, or the hint that stands in its place. */
  present(chosen) {
    document.querySelector("#selection .hint").hidden = chosen;
    byId("chosen").hidden = !chosen;
    byId("panel").classList.toggle("peek", chosen);
  }

  /** What is known at once about the selected point; neighbours follow when they have come. */
  selection(id, { path, ancestors, children, radius }) {
    this.present(true);
    const { scene } = this;
    const [title] = byId("chosen").getElementsByTagName("h2");
    title.textContent = scene.labels[id];
    setPicture(document.querySelector("#chosen > img"), thumbnail(scene, id));
    const facts = [];
    if (scene.levels[id] >= 0) facts.push(["level", String(scene.levels[id])]);
    if (scene.classes[id] >= 0) facts.push(["class", scene.classNames[scene.classes[id]]]);
    facts.push(["radius", short(radius)]);
    if (scene.edges.length) facts.push(["children", number(children)]);
    const list = document.querySelector("#chosen dl");
    list.replaceChildren(...facts.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
    this.way(path, ancestors);
    byId("neighbours").replaceChildren();
  }

  way(path, ancestors) {
    const host = byId("path");
    host.replaceChildren();
    if (path.length < 2) return;
    const steps = path.map((id) => make("li", {}, this.link(id, "")));
    host.append(make("h3", {}, "Path to the root"), make("ol", { class: "items way" }, ...steps));
    const others = ancestors.filter((id) => !path.includes(id));
    if (!others.length) return;
    const also = others.slice(0, LISTED).map((id) => make("li", {}, this.link(id)));
    host.append(make("h3", {}, "Other ancestors"), make("ul", { class: "items" }, ...also));
  }

  /** Lists of nearest neighbours, one for each view on show; names that stand in both are set in bold. */
  neighbours(lists) {
    const everywhere =
      lists.length > 1 ? (id) => lists.every(({ found }) => found.some((n) => n.id === id)) : () => false;
    const columns = lists.map(({ view, found }) => {
      const items = found.map(({ id, distance }) => {
        return make("li", { class: everywhere(id) ? "shared" : null }, this.link(id, undefined, short(distance)));
      });
      const heading = lists.length > 1 ? view.label : "Nearest neighbours";
      return make("div", {}, make("h3", {}, heading), make("ol", { class: "items" }, ...items));
    });
    const host = byId("neighbours");
    host.replaceChildren();
    if (!lists.some(({ found }) => found.length)) return;
    if (lists.length > 1) host.append(make("h3", {}, "Nearest neighbours"));
    host.append(make("div", { class: "columns" }, ...columns));
  }

  /** Say at the end of a part of the panel what went wrong. */
  trouble(part, error) {
    byId(part).append(make("p", { class: "trouble", role: "alert" }, error.message));
  }

  /** A point's name as a button that selects it, with the point marked while the pointer is on it. */
  link(id, swatch, figure) {
    const button = row(this.scene.labels[id], figure, swatch);
    button.addEventListener("click", () => this.act.select(id, { centre: true }));
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, () => this.act.look(id));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => this.act.look(null));
    return button;
  }
}

function row(name, figure, swatch) {
  const button = make("button", { type: "button" });
  if (swatch !== undefined) {
    const dot = make("span", { class: "swatch" });
    if (swatch) dot.style.background = swatch;
    button.append(dot);
  }
  button.append(make("span", { class: "name", title: name }, name));
  if (figure !== undefined) button.append(make("span", { class: "figure" }, figure));
  return button;
}

function gradient({ low, high, stops }) {
  const bar = make("canvas", { width: stops.length, height: 1, "aria-hidden": "true" });
  const context = bar.getContext("2d");
  stops.forEach((colour, i) => {
    context.fillStyle = css(colour);
    context.fillRect(i, 0, 1, 1);
  });
  return [bar, make("p", { class: "ends" }, make("span", {}, short(low)), make("span", {}, short(high)))];
}

/** How a view was made, and how far distances in the picture are from the true ones. */
function described({ label, dim, curvature, method, distortion }) {
  const space = [`${label}: ${number(dim)} dimensions`, curvature && `curvature −${short(curvature)}`]
    .filter(Boolean)
    .join(", ");
  const how = method.charAt(0).toUpperCase() + method.slice(1);
  if (!distortion) return `${space}. ${how}.`;
  const { mean, worst, pairs } = distortion;
  const spread = worst === null ? "" : `, stretched unevenly by a factor of ${short(worst)} at worst`;
  return `${space}. ${how}. Distances are off by ${short(100 * mean)} % on average${spread} (${number(pairs)} pairs).`;
}
