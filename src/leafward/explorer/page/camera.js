// What the viewer sees of a view. A camera maps model coordinates to the frame, in which the disk (or the unit of a
// plane) has radius 1, and `zoom` magnifies the frame about its centre. Points given to a camera are in the magnified
// frame.

import {
  IDENTITY,
  apply,
  compose,
  distance,
  dragging,
  inverse,
  matrixOf,
  reach,
  transform,
  translation,
  translationAlong,
} from "./mobius.js";

const RIM = 0.995; // a pointer beyond this radius holds the rim, where a pixel would be an arbitrary distance
const ZOOM = [0.5, 200];

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** The Poincaré disk: moving is an isometry, magnifying is a plain enlargement of the picture about its centre. */
export class DiskCamera {
  curved = true;

  /** `home` is the isometry of the first view, to which a reset returns. */
  constructor(home = IDENTITY) {
    this.start = home;
    this.pose = { isometry: home, zoom: 1 };
  }

  get zoom() {
    return this.pose.zoom;
  }

  matrix() {
    return matrixOf(this.pose.isometry);
  }

  /** The map from the frame of an earlier pose to the frame now, for coordinates that were mapped with that pose. */
  since(earlier) {
    return matrixOf(this.step(earlier));
  }

  step(earlier) {
    return compose(this.pose.isometry, inverse(earlier.isometry));
  }

  /** Where the centre of the first view is now. */
  startPlace() {
    return apply(this.pose.isometry, apply(inverse(this.start), [0, 0]));
  }

  /** How far the view has moved since an earlier pose; the picture is enlarged nowhere by more than e^drift. */
  drift(earlier) {
    return reach(this.step(earlier)) + Math.abs(Math.log(this.pose.zoom / earlier.zoom));
  }

  /** Point of the disk under a point of the magnified frame. */
  under([x, y]) {
    const length = Math.hypot(x, y) / this.pose.zoom;
    const scale = Math.min(1, RIM / length) / this.pose.zoom;
    return [x * scale, y * scale];
  }

  move(step) {
    this.pose = { ...this.pose, isometry: compose(step, this.pose.isometry) };
  }

  /** Model point held by a drag that begins here. */
  grab(at) {
    return apply(inverse(this.pose.isometry), this.under(at));
  }

  /** Bring a grabbed model point under the pointer. */
  pull(held, at) {
    this.move(dragging(apply(this.pose.isometry, held), this.under(at)));
  }

  /** Wheel: a hyperbolic translation. In: what lies under the pointer comes toward the centre. Out: home does. */
  fly(at, amount) {
    const target = amount > 0 ? this.under(at) : this.startPlace();
    const length = Math.hypot(...target);
    if (amount > 0) this.move(translationAlong(target, -amount * Math.min(1, 4 * length)));
    else this.move(translationAlong(target, -Math.min(-amount, distance([0, 0], target))));
    if (amount < 0 && this.pose.zoom > 1) this.magnify(at, Math.max(Math.exp(amount), 1 / this.pose.zoom));
  }

  magnify(_, factor) {
    this.pose = { ...this.pose, zoom: clamp(this.pose.zoom * factor, ...ZOOM) };
  }

  /** Keys: a translation by a share of what is in sight. */
  pan([dx, dy]) {
    this.move(translation([(-0.2 * dx) / Math.max(1, this.pose.zoom), (-0.2 * dy) / Math.max(1, this.pose.zoom)]));
  }

  /** The pose at share t of the way that brings a model point to the centre along a geodesic. */
  toward(point) {
    const { isometry, zoom } = this.pose;
    const there = apply(isometry, point);
    const length = distance([0, 0], there);
    return (t) => ({ isometry: compose(translationAlong(there, -t * length), isometry), zoom });
  }

  /** The pose at share t of the return to the first view. */
  home() {
    const { zoom } = this.pose;
    const [ar, ai] = this.step({ isometry: this.start });
    const there = this.startPlace();
    const length = distance([0, 0], there);
    const turn = Math.atan2(ai, ar); // a rotation by twice this angle
    return (t) => {
      const rotation = [Math.cos(turn * (1 - t)), Math.sin(turn * (1 - t)), 0, 0];
      const left = compose(translationAlong(there, (1 - t) * length), rotation);
      return { isometry: compose(left, this.start), zoom: zoom ** (1 - t) };
    };
  }
}

/** A flat view: ordinary pan and zoom, w = scale · z + offset. */
export class PlaneCamera {
  curved = false;
  zoom = 1;

  constructor() {
    this.pose = { scale: 0.85, offset: [0, 0] };
  }

  matrix() {
    return [this.pose.scale, 0, ...this.pose.offset, 0, 0, 1, 0];
  }

  since(earlier) {
    const scale = this.pose.scale / earlier.scale;
    return [scale, 0, ...this.pose.offset.map((o, i) => o - scale * earlier.offset[i]), 0, 0, 1, 0];
  }

  drift(earlier) {
    const [scale, , x, y] = this.since(earlier);
    return Math.abs(Math.log(scale)) + Math.hypot(x, y);
  }

  grab(at) {
    return at.map((v, i) => (v - this.pose.offset[i]) / this.pose.scale);
  }

  pull(held, at) {
    this.pose = { ...this.pose, offset: at.map((v, i) => v - this.pose.scale * held[i]) };
  }

  fly(at, amount) {
    this.magnify(at, Math.exp(amount));
  }

  magnify(at, factor) {
    const held = this.grab(at);
    this.pose = { ...this.pose, scale: clamp(this.pose.scale * factor, 0.05, 1e4) };
    this.pull(held, at);
  }

  pan([dx, dy]) {
    const [x, y] = this.pose.offset;
    this.pose = { ...this.pose, offset: [x - 0.2 * dx, y - 0.2 * dy] };
  }

  toward(point) {
    const { scale, offset } = this.pose;
    const [x, y] = transform(this.matrix(), point);
    return (t) => ({ scale, offset: [offset[0] - t * x, offset[1] - t * y] });
  }

  home() {
    const { scale, offset } = this.pose;
    const end = new PlaneCamera().pose;
    return (t) => ({
      scale: scale ** (1 - t) * end.scale ** t,
      offset: offset.map((o, i) => (1 - t) * o + t * end.offset[i]),
    });
  }
}
