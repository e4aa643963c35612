// Points and taxonomy edges in WebGL2. Buffers hold positions in the frame of some earlier pose of the camera; the
// vertex shader applies the Möbius map from there to the pose of this frame, so that a frame costs a few uniforms.

import { ROW, SEGMENTS } from "./detail.js";

const COMPLEX = `#version 300 es
precision highp float;
uniform vec2 u_map[4];  // z ↦ (A z + B) / (C z + D)
uniform float u_unit;   // pixels per unit of the frame, magnification included
uniform vec2 u_half;    // half the canvas, in pixels
vec2 times(vec2 p, vec2 q) { return vec2(p.x * q.x - p.y * q.y, p.x * q.y + p.y * q.x); }
vec2 over(vec2 p, vec2 q) { return vec2(dot(p, q), p.y * q.x - p.x * q.y) / max(dot(q, q), 1e-20); }
vec2 moved(vec2 z) { return over(times(u_map[0], z) + u_map[1], times(u_map[2], z) + u_map[3]); }
`;

const POINTS = `${COMPLEX}
uniform vec3 u_size;    // diameter at the centre, least diameter (pixels), how much the disk shrinks them at its rim
layout(location = 0) in vec2 a_point;
layout(location = 1) in vec4 a_colour;
layout(location = 2) in float a_size;
out vec4 v_colour;
out float v_size;
void main() {
  vec2 w = moved(a_point);
  float room = clamp(1.0 - u_size.z * dot(w, w), 0.0, 1.0);
  v_size = max(u_size.y, u_size.x * a_size * (0.4 + 0.6 * room)) + 1.0;
  v_colour = a_colour;
  gl_PointSize = v_size;
  gl_Position = vec4(w * u_unit / u_half, 0.0, 1.0);
}`;

const DISC = `#version 300 es
precision highp float;
uniform vec3 u_halo;
in vec4 v_colour;
in float v_size;
out vec4 colour;
void main() {
  float inside = 0.5 * v_size - length(gl_PointCoord - 0.5) * v_size;  // pixels from the edge
  // Larger points get a thin ring of the background, which keeps neighbours apart.
  float ring = v_size > 6.0 ? 1.0 - smoothstep(1.0, 2.0, inside) : 0.0;
  float alpha = clamp(inside, 0.0, 1.0) * v_colour.a;
  colour = vec4(mix(v_colour.rgb, u_halo, ring) * alpha, alpha);
}`;

// A ribbon along the geodesic z(t) of mobius.js (arcTurn, arcPoint), whose tangent is
// z'(t) = e (q − p) / ((1 − t) + e t)². Two triangles a segment; the ends of an edge are fetched by the number of the
// vertex, since many short instances are slow on some drivers (a software renderer pays for each as for a draw call).
const RIBBON = `${COMPLEX}
uniform highp sampler2D u_ends;  // px, py, qx, qy of one edge a texel
uniform int u_segments;
uniform float u_width;
uniform bool u_curved;
out float v_side;
void main() {
  int corner = gl_VertexID % 6;
  int segment = (gl_VertexID / 6) % u_segments;
  int edge = gl_VertexID / (6 * u_segments);
  vec4 ends = texelFetch(u_ends, ivec2(edge % ${ROW}, edge / ${ROW}), 0);
  vec2 p = moved(ends.xy);
  vec2 q = moved(ends.zw);
  vec2 c = vec2(1.0 - dot(p, q), p.x * q.y - p.y * q.x);
  vec2 e = u_curved && dot(c, c) > 1e-12 ? normalize(c) : vec2(1.0, 0.0);
  bool far = corner == 2 || corner == 4 || corner == 5;
  bool left = corner == 1 || corner == 3 || corner == 5;
  float t = float(segment + int(far)) / float(u_segments);
  vec2 d = vec2(1.0 - t, 0.0) + e * t;
  vec2 z = over(p * (1.0 - t) + times(q, e) * t, d);
  vec2 along = times(times(e, q - p), vec2(d.x * d.x - d.y * d.y, -2.0 * d.x * d.y));
  float length2 = dot(along, along);
  vec2 across = length2 > 0.0 ? vec2(-along.y, along.x) * inversesqrt(length2) : vec2(0.0);
  v_side = (left ? 1.0 : -1.0) * (0.5 * u_width + 1.0);
  gl_Position = vec4((z * u_unit + across * v_side) / u_half, 0.0, 1.0);
}`;

const INK = `#version 300 es
precision highp float;
uniform vec4 u_ink;
uniform float u_width;
in float v_side;
out vec4 colour;
void main() {
  float alpha = u_ink.a * clamp(0.5 * u_width + 0.5 - abs(v_side), 0.0, 1.0);
  colour = vec4(u_ink.rgb * alpha, alpha);
}`;

// Straight edges by the ten thousand: a line of one pixel has a third of a ribbon's vertices, and each is cheaper.
const HAIR = `${COMPLEX}
layout(location = 0) in vec2 a_end;
void main() {
  gl_Position = vec4(moved(a_end) * u_unit / u_half, 0.0, 1.0);
}`;

const FLAT = `#version 300 es
precision highp float;
uniform vec4 u_ink;
out vec4 colour;
void main() {
  colour = vec4(u_ink.rgb * u_ink.a, u_ink.a);
}`;

const MANY = 2000; // straight edges, from which on they are drawn as hairs

/** A linked program and the places of its uniforms, looked up once. */
function program(gl, vertex, fragment) {
  const made = gl.createProgram();
  for (const [kind, source] of [
    [gl.VERTEX_SHADER, vertex],
    [gl.FRAGMENT_SHADER, fragment],
  ]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(made, shader);
    gl.deleteShader(shader);
  }
  gl.linkProgram(made);
  if (!gl.getProgramParameter(made, gl.LINK_STATUS) && !gl.isContextLost()) {
    throw new Error(`the graphics driver refused a shader: ${gl.getProgramInfoLog(made)}`);
  }
  const places = new Map();
  const at = (name) => {
    if (!places.has(name)) places.set(name, gl.getUniformLocation(made, name));
    return places.get(name);
  };
  return { made, at };
}

export class Renderer {
  /** `sizes` scales the diameter of each point. */
  constructor(canvas, sizes) {
    const gl = canvas.getContext("webgl2", { antialias: false, depth: false, powerPreference: "high-performance" });
    if (!gl) throw new Error("WebGL2 is not available in this browser");
    this.gl = gl;
    this.count = 0;
    this.points = program(gl, POINTS, DISC);
    this.ribbon = program(gl, RIBBON, INK);
    this.hair = program(gl, HAIR, FLAT);
    this.hairs = { count: 0, ends: gl.createBuffer(), bound: gl.createVertexArray() };
    gl.bindVertexArray(this.hairs.bound);
    this.attribute(this.hairs.ends, 0, 2, gl.FLOAT);
    this.positions = gl.createBuffer();
    this.colours = gl.createBuffer();
    this.dots = gl.createVertexArray();
    gl.bindVertexArray(this.dots);
    this.attribute(this.positions, 0, 2, gl.FLOAT);
    this.attribute(this.colours, 1, 4, gl.UNSIGNED_BYTE, true);
    const size = gl.createBuffer();
    this.attribute(size, 2, 1, gl.FLOAT);
    gl.bufferData(gl.ARRAY_BUFFER, sizes, gl.STATIC_DRAW);
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, gl.createBuffer());
    this.nothing = gl.createVertexArray(); // ribbons take no attributes
    this.lines = SEGMENTS.map((segments) => ({ segments, count: 0, ends: this.texture() }));
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  attribute(buffer, location, size, type, normalised = false) {
    const { gl } = this;
    gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
    gl.enableVertexAttribArray(location);
    gl.vertexAttribPointer(location, size, type, normalised, 0, 0);
  }

  texture() {
    const { gl } = this;
    const texture = gl.createTexture();
    gl.bindTexture(gl.TEXTURE_2D, texture);
    for (const name of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER])
      gl.texParameteri(gl.TEXTURE_2D, name, gl.NEAREST);
    return texture;
  }

  upload(buffer, data) {
    const { gl } = this;
    gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
    gl.bufferData(gl.ARRAY_BUFFER, data, gl.DYNAMIC_DRAW);
  }

  setPositions(xy) {
    this.upload(this.positions, xy);
  }

  /** The points to draw, in the order in which they are painted. */
  setOrder(order) {
    const { gl } = this;
    this.count = order.length;
    gl.bindVertexArray(this.dots);
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, order, gl.DYNAMIC_DRAW);
    gl.bindVertexArray(null);
  }

  /** RGBA of every point, one byte each. */
  setColours(rgba) {
    this.upload(this.colours, rgba);
  }

  /** The edges to draw, as EdgeSorter has sorted them: for each number of segments {count, ends}. */
  setEdges(sorted) {
    const { gl } = this;
    const [straight] = sorted;
    this.hairs.count = straight.count > MANY ? straight.count : 0;
    if (this.hairs.count) this.upload(this.hairs.ends, straight.ends.subarray(0, 4 * straight.count));
    sorted.forEach(({ count, ends }, i) => {
      this.lines[i].count = i === 0 && this.hairs.count ? 0 : count;
      if (!this.lines[i].count) return;
      gl.bindTexture(gl.TEXTURE_2D, this.lines[i].ends);
      gl.texImage2D(
        gl.TEXTURE_2D,
        0,
        gl.RGBA32F,
        ROW,
        Math.ceil(count / ROW),
        0,
        gl.RGBA,
        gl.FLOAT,
        ends,
      );
    });
  }

  /** One frame. Sizes are in device pixels; `ink` is [r, g, b, alpha] and `halo` [r, g, b], each in [0, 1]. */
  draw({ matrix, unit, curved, ink, halo, width, size }) {
    const { gl } = this;
    const { width: w, height: h } = gl.canvas;
    gl.viewport(0, 0, w, h);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    const use = ({ made, at }) => {
      gl.useProgram(made);
      gl.uniform2fv(at("u_map"), matrix);
      gl.uniform1f(at("u_unit"), unit);
      gl.uniform2f(at("u_half"), w / 2, h / 2);
      return at;
    };
    if (this.hairs.count) {
      const hair = use(this.hair);
      gl.uniform4f(hair("u_ink"), ...ink.slice(0, 3), ink[3] * Math.min(1, width));
      gl.bindVertexArray(this.hairs.bound);
      gl.drawArrays(gl.LINES, 0, 2 * this.hairs.count);
    }
    const line = use(this.ribbon);
    gl.uniform1f(line("u_width"), width);
    gl.uniform1i(line("u_curved"), curved ? 1 : 0);
    gl.uniform4fv(line("u_ink"), ink);
    gl.bindVertexArray(this.nothing);
    for (const { segments, count, ends } of this.lines) {
      if (!count) continue;
      gl.bindTexture(gl.TEXTURE_2D, ends);
      gl.uniform1i(line("u_segments"), segments);
      gl.drawArrays(gl.TRIANGLES, 0, 6 * segments * count);
    }
    const dot = use(this.points);
    gl.uniform3f(dot("u_size"), ...size, curved ? 1 : 0);
    gl.uniform3fv(dot("u_halo"), halo);
    gl.bindVertexArray(this.dots);
    gl.drawElements(gl.POINTS, this.count, gl.UNSIGNED_INT, 0);
    gl.bindVertexArray(null);
  }

  /** Tell, once it is known, how many milliseconds the card took for what it was last told; one frame at a time. */
  timed(told) {
    const { gl } = this;
    if (this.fence) return;
    this.fence = gl.fenceSync(gl.SYNC_GPU_COMMANDS_COMPLETE, 0);
    gl.flush();
    const begin = performance.now();
    const look = () => {
      if (!gl.isContextLost() && gl.getSyncParameter(this.fence, gl.SYNC_STATUS) !== gl.SIGNALED) {
        setTimeout(look, 4);
        return;
      }
      gl.deleteSync(this.fence);
      this.fence = null;
      told(performance.now() - begin);
    };
    setTimeout(look, 4);
  }

  /** Wait until the card has drawn what it was told, by reading one pixel of it. */
  finish() {
    this.gl.readPixels(0, 0, 1, 1, this.gl.RGBA, this.gl.UNSIGNED_BYTE, new Uint8Array(4));
  }
}
