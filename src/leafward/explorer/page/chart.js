// One view on the screen: three canvases (ground, points, names), a camera, and what is marked.

import { DiskCamera, PlaneCamera } from "./camera.js";
import { Crowd } from "./crowd.js";
import { EdgeSorter } from "./detail.js";
import { Renderer } from "./gl.js";
import { placeLabels, shortlist } from "./labels.js";
import { IDENTITY, balanced, transform, transformAll, translation } from "./mobius.js";
import { FONT, paintGround, paintLabels, paintMarks } from "./paint.js";

const DRIFT = 0.5; // the view may move this far before positions are mapped anew in float64
const CELL = 0.6; // pixels: of the points in a square of this size one is drawn
const NAMES = 0.25; // share of what is in sight by which the view may move before other points can be named
const SLOW = 40; // milliseconds that the card may take for a frame before less is drawn while the view moves
const COARSEST = 4; // each step of coarseness doubles the size of what is left out
const REST = 350; // milliseconds without a frame, after which everything is drawn
const APART = 1000; // milliseconds between frames of different movements
const REACH = 14; // a pointer picks a point within this many pixels
const MARGIN = 14;

const NOTHING = { selected: null, hover: null, path: [], neighbours: [] };

export class Chart {
  /** `host` is the element to fill; `cast` says how points look: {order, sizes, importance}. */
  constructor(host, scene, cast, theme) {
    this.host = host;
    this.scene = scene;
    this.cast = cast;
    this.theme = theme;
    this.marks = NOTHING;
    this.labels = [];
    this.layers = ["ground", "points", "names"].map((name) => {
      const canvas = document.createElement("canvas");
      canvas.className = name;
      canvas.setAttribute("aria-hidden", "true");
      host.append(canvas);
      return canvas;
    });
    this.places = new Float64Array(2 * scene.count);
    this.widths = new Map();
    this.coarse = 0;
    this.needed = 0;
    this.uploaded = new Float32Array(2 * scene.count);
    this.edges = new EdgeSorter(scene.edges);
    this.crowd = new Crowd(cast.order);
    this.openRenderer();
    this.layers[1].addEventListener("webglcontextlost", (event) => {
      event.preventDefault();
      this.renderer = null;
    });
    this.layers[1].addEventListener("webglcontextrestored", () => {
      this.openRenderer();
      this.invalidate();
    });
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(host);
  }

  openRenderer() {
    this.renderer = new Renderer(this.layers[1], this.cast.sizes);
    if (this.rgba) this.renderer.setColours(this.rgba);
    this.base = null;
  }

  close() {
    this.watcher.disconnect();
    cancelAnimationFrame(this.pending);
    cancelAnimationFrame(this.moving);
    clearTimeout(this.resting);
    this.renderer?.gl.getExtension("WEBGL_lose_context")?.loseContext();
    this.host.remove();
  }

  /** Show a view's coordinates, from its home position. */
  setView(view, { xy }) {
    this.view = view;
    this.xy = xy;
    // A root gives the origin a meaning; without one the picture is centred on the points.
    const start = this.scene.root === null ? balanced : () => IDENTITY;
    this.camera = view.space === "disk" ? new DiskCamera(start(xy)) : new PlaneCamera();
    let farthest = 0;
    for (let i = 0; i < xy.length; i += 2) farthest = Math.max(farthest, xy[i] ** 2 + xy[i + 1] ** 2);
    this.farthest = 2 * Math.atanh(Math.min(Math.sqrt(farthest), 1 - 1e-12));
    this.mapped = null;
    this.needed = 0;
    this.resize();
  }

  /** Colour every point; those that `mask` leaves out fade. */
  setColours(colour, mask) {
    const { count } = this.scene;
    const solid = count > 20000 ? 205 : 245;
    this.rgba ??= new Uint8Array(4 * count);
    for (let i = 0; i < count; i++) {
      const [r, g, b] = colour(i);
      this.rgba[4 * i] = r;
      this.rgba[4 * i + 1] = g;
      this.rgba[4 * i + 2] = b;
      this.rgba[4 * i + 3] = !mask || mask[i] ? solid : 20;
    }
    this.mask = mask;
    this.forget(); // which points lie on top may have changed
    this.renderer?.setColours(this.rgba);
    this.invalidate();
  }

  setTheme(theme) {
    this.theme = theme;
    this.invalidate();
  }

  mark(marks) {
    this.marks = { ...this.marks, ...marks };
    this.invalidate("marks");
  }

  resize() {
    this.width = this.host.clientWidth;
    this.height = this.host.clientHeight;
    this.radius = Math.max(20, Math.min(this.width, this.height) / 2 - MARGIN);
    this.setPixels(window.devicePixelRatio || 1);
    this.forget();
    this.invalidate();
  }

  /** Choose anew what is drawn and what is named. */
  forget() {
    this.base = null;
    this.listed = null;
  }

  setPixels(ratio) {
    this.ratio = ratio;
    for (const canvas of this.layers) {
      canvas.width = Math.max(1, Math.round(this.width * ratio));
      canvas.height = Math.max(1, Math.round(this.height * ratio));
    }
  }

  /** How the magnified frame lies in the host, in CSS pixels. */
  get lens() {
    return { half: [this.width / 2, this.height / 2], unit: this.radius * this.camera.zoom };
  }

  /** Diameter of a point of ordinary size at the centre, in CSS pixels. */
  get diameter() {
    const crowd = Math.min(14, Math.max(2.6, 24 * this.scene.count ** -0.17));
    return crowd * Math.min(2.5, Math.max(1, this.camera.zoom) ** 0.35);
  }

  /** Draw soon: everything, or only the marks and names above the points. */
  invalidate(what = "view") {
    this.stale ||= what === "view";
    if (!this.camera) return;
    this.pending ??= requestAnimationFrame((now) => {
      if (this.stale) this.pace(now);
      this.draw();
    });
  }

  /** Where the card took long for the last two frames of a movement, leave out what is smallest until it ends; how much,
   * the next movement knows. */
  pace(now) {
    const gap = now - (this.last ?? -Infinity);
    const { took = 0 } = this;
    this.last = now;
    this.took = undefined;
    if (gap > APART) this.slow = 0;
    else if (took) this.slow = took > SLOW ? (this.slow ?? 0) + 1 : 0;
    if (this.slow > 1) {
      this.needed = Math.min(COARSEST, this.needed + (took > 3 * SLOW ? 2 : 1));
      this.slow = 0;
    }
    this.detail(gap < APART ? this.needed : 0);
    clearTimeout(this.resting);
    if (this.coarse) {
      this.resting = setTimeout(() => {
        this.detail(0);
        this.stale = true;
        this.draw();
      }, REST);
    }
  }

  detail(coarse) {
    if (this.coarse !== coarse) this.base = null;
    this.coarse = coarse;
  }

  draw() {
    cancelAnimationFrame(this.pending);
    this.pending = undefined;
    if (this.stale) this.drawPoints();
    this.stale = false;
    this.drawNames();
  }

  drawPoints() {
    const { camera, ratio, theme, renderer } = this;
    if (!this.base || camera.drift(this.base) > DRIFT) this.rebase();
    renderer?.draw({
      matrix: camera.since(this.base),
      unit: this.radius * camera.zoom * ratio,
      curved: camera.curved,
      ink: theme.edge,
      halo: camera.curved ? theme.diskRgb : theme.stageRgb,
      width: this.lineWidth * ratio,
      size: [this.diameter * ratio, this.leastDiameter * ratio],
    });
    renderer?.timed((milliseconds) => {
      this.took = milliseconds;
    });
    const ground = this.context(0);
    paintGround(ground, this.lens, camera, this.farthest, theme);
  }

  get lineWidth() {
    return this.scene.edges.length > 10000 ? 0.8 : 1.1;
  }

  get leastDiameter() {
    return this.scene.count > 20000 ? 1.1 : 2.8;
  }

  /** Give the card positions as they are mapped now, in float64, so that its float32 only has a small step to make. */
  rebase() {
    const { frame, camera, renderer } = this;
    this.uploaded.set(frame);
    this.base = camera.pose;
    if (!renderer) return;
    renderer.setPositions(this.uploaded);
    const pixels = this.radius * camera.zoom * this.ratio;
    const left = 2 ** this.coarse;
    renderer.setOrder(this.crowd.thin(frame, (left * CELL) / pixels, this.mask));
    renderer.setEdges(this.edges.sort(frame, pixels * Math.exp(DRIFT), camera.curved, left));
  }

  drawNames() {
    const { marks, camera, lens, theme } = this;
    const names = this.context(2);
    paintMarks(names, lens, marks, (id) => this.place(id), camera.curved, theme);
    const first = marks.selected === null ? [] : [marks.selected, ...marks.path, ...marks.neighbours];
    const shown = new Set(this.labels.map(({ id }) => id));
    const { importance } = this.cast;
    const view = { ...lens, curved: camera.curved, importance, shown, gap: this.diameter / 2 + 4 };
    if (!this.listed || camera.drift(this.listed) * Math.max(1, camera.zoom) > NAMES) {
      this.listed = camera.pose;
      this.namable = shortlist(view, this.frame, this.mask, NAMES);
    }
    const matrix = camera.matrix();
    view.place = (id) => transform(matrix, [this.xy[2 * id], this.xy[2 * id + 1]]);
    const width = (text, size) => (this.widthOf(names, text) * size) / 100;
    this.labels = placeLabels(view, this.namable, this.scene.labels, first, width);
    paintLabels(names, this.labels, marks.selected, camera.curved ? theme.disk : theme.stage, theme.ink);
  }

  /** Width of a text in letters of 100 pixels; measuring costs more than all else about a name. */
  widthOf(context, text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      context.font = `100px ${FONT}`;
      width = context.measureText(text).width;
      this.widths.set(text, width);
    }
    return width;
  }

  context(layer) {
    const context = this.layers[layer].getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    return context;
  }

  /** Places of all points in the frame, before magnification: mapped when they are asked for, not in every frame. */
  get frame() {
    if (this.mapped !== this.camera.pose) transformAll(this.camera.matrix(), this.xy, this.places);
    this.mapped = this.camera.pose;
    return this.places;
  }

  /** Place of one point in the frame. */
  place(id) {
    return transform(this.camera.matrix(), [this.xy[2 * id], this.xy[2 * id + 1]]);
  }

  /** Point of the magnified frame at a pixel of the host. */
  toFrame([x, y]) {
    return [(x - this.width / 2) / this.radius, (this.height / 2 - y) / this.radius];
  }

  /** The point nearest to a pixel of the host, or null where none is within reach. */
  pick([x, y], within = REACH) {
    const { frame, mask } = this;
    const { half, unit } = this.lens;
    const fx = (x - half[0]) / unit;
    const fy = (half[1] - y) / unit;
    let best = (within / unit) ** 2;
    let found = null;
    for (let i = 0; i < this.scene.count; i++) {
      const d = (frame[2 * i] - fx) ** 2 + (frame[2 * i + 1] - fy) ** 2;
      if (d < best && (!mask || mask[i])) {
        best = d;
        found = i;
      }
    }
    return found;
  }

  /** Follow a path of poses from t = 0 to 1, at once for readers who asked for less motion. */
  travel(poseAt, milliseconds = 450) {
    this.halt();
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    const begin = performance.now();
    const step = (now) => {
      const t = still ? 1 : Math.min(1, Math.max(0, now - begin) / milliseconds);
      this.camera.pose = poseAt(t * t * (3 - 2 * t));
      this.invalidate();
      if (t < 1) this.moving = requestAnimationFrame(step);
    };
    step(begin);
  }

  halt() {
    cancelAnimationFrame(this.moving);
  }

  centre(id) {
    this.travel(this.camera.toward([this.xy[2 * id], this.xy[2 * id + 1]]));
  }

  goHome() {
    this.travel(this.camera.home());
  }

  /** Frames per second over `frames` frames of a pan along a closed way, each one finished before the next begins, with
   * everything drawn or at a step of coarseness, and the milliseconds that this script takes of each. */
  benchmark(frames, coarse = 0) {
    this.halt();
    const { pose } = this.camera;
    this.detail(coarse);
    let script = 0;
    const begin = performance.now();
    for (let i = 0; i < frames; i++) {
      const started = performance.now();
      const angle = (2 * Math.PI * i) / frames;
      const step = [0.08 * Math.cos(angle), 0.08 * Math.sin(angle)];
      if (this.camera.curved) this.camera.move(translation(step));
      else this.camera.pan(step);
      this.stale = true;
      this.draw();
      script += performance.now() - started;
      this.renderer.finish();
    }
    const seconds = (performance.now() - begin) / 1000;
    this.camera.pose = pose;
    this.detail(0);
    this.invalidate();
    return { rate: frames / seconds, script: script / frames };
  }
}
