// Pointer, wheel and keys on a chart.

const STILL = 4; // a press that moves less than this many pixels is a click
const PANS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

const middle = ([a, b]) => [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2];
const apart = ([a, b]) => Math.hypot(a[0] - b[0], a[1] - b[1]);

/** `report` is {pick(id | null), hover(id | null, [x, y]), centre(id)}. */
export class Gestures {
  constructor(chart, report) {
    this.chart = chart;
    this.report = report;
    this.pressed = new Map(); // pointer id → [x, y] in the host
    const { host } = chart;
    for (const name of [
      "pointerdown",
      "pointermove",
      "pointerup",
      "pointercancel",
      "pointerleave",
      "dblclick",
      "keydown",
    ]) {
      host.addEventListener(name, (event) => this[name](event));
    }
    host.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  spot(event) {
    const box = this.chart.host.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** Where the pressed pointers are together, in the magnified frame. */
  together() {
    const spots = [...this.pressed.values()];
    return this.chart.toFrame(spots.length > 1 ? middle(spots) : spots[0]);
  }

  grab() {
    if (this.pressed.size) this.held = this.chart.camera.grab(this.together());
  }

  pointerdown(event) {
    if (event.button !== 0 || this.pressed.size === 2) return;
    this.chart.halt();
    this.chart.host.setPointerCapture(event.pointerId);
    this.clicking = this.pressed.size === 0;
    this.start = this.spot(event);
    this.pressed.set(event.pointerId, this.start);
    this.grab();
  }

  pointermove(event) {
    const spot = this.spot(event);
    if (!this.pressed.has(event.pointerId)) {
      this.lookAt(spot);
      return;
    }
    const before = [...this.pressed.values()];
    this.pressed.set(event.pointerId, spot);
    if (this.clicking && apart([this.start, spot]) < STILL) return;
    this.clicking = false;
    const { camera, host } = this.chart;
    host.classList.add("dragging");
    if (before.length === 2)
      camera.magnify(this.together(), apart([...this.pressed.values()]) / Math.max(1, apart(before)));
    camera.pull(this.held, this.together());
    this.chart.invalidate();
    this.report.hover(null, spot);
  }

  pointerup(event) {
    if (!this.pressed.delete(event.pointerId)) return;
    this.chart.host.classList.remove("dragging");
    if (this.clicking)
      this.report.pick(this.chart.pick(this.spot(event), event.pointerType === "touch" ? 22 : undefined));
    this.clicking = false;
    this.grab();
  }

  pointercancel(event) {
    this.clicking = false;
    this.pointerup(event);
  }

  pointerleave(event) {
    if (!this.pressed.size) this.report.hover(null, this.spot(event));
  }

  /** Name what lies under the pointer, at most once a frame. */
  lookAt(spot) {
    this.looking ??= requestAnimationFrame(() => {
      this.looking = undefined;
      this.report.hover(this.chart.pick(this.lastSpot), this.lastSpot);
    });
    this.lastSpot = spot;
  }

  dblclick(event) {
    const spot = this.spot(event);
    const id = this.chart.pick(spot);
    if (id !== null) this.report.centre(id);
    else this.chart.travel(this.chart.camera.toward(this.chart.camera.grab(this.chart.toFrame(spot))));
  }

  wheel(event) {
    event.preventDefault();
    this.chart.halt();
    const pixels = event.deltaY * (event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1);
    const at = this.chart.toFrame(this.spot(event));
    // A pinch on a trackpad arrives as a wheel with the control key.
    if (event.ctrlKey) this.chart.camera.magnify(at, Math.exp(-pixels * 0.01));
    else this.chart.camera.fly(at, Math.max(-0.6, Math.min(0.6, -pixels * 0.003)));
    this.chart.invalidate();
  }

  keydown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { chart } = this;
    if (event.key in PANS) chart.camera.pan(PANS[event.key]);
    else if (event.key === "+" || event.key === "=") chart.camera.magnify([0, 0], 1.25);
    else if (event.key === "-") chart.camera.magnify([0, 0], 0.8);
    else if (event.key === "0") chart.goHome();
    else if (event.key === "Enter") this.report.pick(chart.pick([chart.width / 2, chart.height / 2], Infinity));
    else return;
    event.preventDefault();
    chart.invalidate();
  }
}
