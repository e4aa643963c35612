// Where the page's data come from: tags embedded in a static export, or the server that served the page.

const embedded = (name) => document.querySelector(`script[data-name="${CSS.escape(name)}"]`);

/** Whether this page is a static export, which has no server behind it. */
export const STATIC = embedded("scene.json") !== null;

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function answerOf(name) {
  const response = await fetch(`./${name}`).catch(() => {
    throw new Error("The server no longer answers. Is the explore command still running?");
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Error(said.error ?? `${name}: the server answered ${response.status}`);
}

/** The named piece of data: an object for JSON, else its bytes as an ArrayBuffer. */
export async function load(name) {
  const json = name.split("?")[0].endsWith(".json");
  const tag = embedded(name);
  if (tag) {
    const bytes = bytesOf(tag.textContent.trim());
    return json ? JSON.parse(new TextDecoder().decode(bytes)) : bytes.buffer;
  }
  if (STATIC) throw new Error(`${name} is not part of this static page`);
  const response = await answerOf(name);
  return json ? response.json() : response.arrayBuffer();
}

/** A numeric array of a stated length; a shorter or longer file is an error rather than a wrong picture. */
async function numbers(name, Kind, length) {
  const buffer = await load(name);
  if (buffer.byteLength !== length * Kind.BYTES_PER_ELEMENT) {
    throw new Error(`${name} has ${buffer.byteLength} bytes, expected ${length * Kind.BYTES_PER_ELEMENT}`);
  }
  return new Kind(buffer);
}

/** Address of a point's thumbnail, or null where it has none. */
export function thumbnail(scene, id) {
  if (!scene.pictured[id]) return null;
  if (!STATIC) return `./thumb/${id}`;
  return `data:image/jpeg;base64,${embedded(`thumb/${id}`).textContent.trim()}`;
}

/** Everything that does not depend on the view. */
export async function loadScene() {
  const scene = await load("scene.json");
  const [labels, attributes, edges] = await Promise.all([
    load("labels.json"),
    numbers("attributes.bin", Int32Array, 2 * scene.count),
    scene.edges ? numbers("edges.bin", Int32Array, 2 * scene.edges) : new Int32Array(0),
  ]);
  const levels = attributes.filter((_, i) => i % 2 === 0);
  const classes = attributes.filter((_, i) => i % 2 === 1);
  const pictured = new Uint8Array(scene.count);
  for (const id of scene.thumbnails) pictured[id] = 1;
  return { ...scene, labels, levels, classes, classNames: scene.classes, edges, pictured };
}

/** A function of a key that keeps its answers; a failure is forgotten, so that it can be asked again. */
function remembered(ask) {
  const seen = new Map();
  return (key) => {
    if (!seen.has(key)) {
      const answer = ask(key);
      answer.catch(() => seen.delete(key));
      seen.set(key, answer);
    }
    return seen.get(key);
  };
}

/** Reads the coordinates and radii of a view: key ↦ {xy, radii}. */
export function viewLoader(scene) {
  return remembered(async (key) => {
    const [xy, radii] = await Promise.all([
      numbers(`view/${key}.bin`, Float64Array, 2 * scene.count),
      numbers(`radius/${key}.bin`, Float32Array, scene.count),
    ]);
    return { xy, radii };
  });
}

/** Finds the k nearest neighbours in the original space of a view: (key, id) ↦ [{id, distance}], nearest first. */
export function neighbourFinder(scene) {
  const { count, k } = scene;
  const table = remembered((key) =>
    Promise.all([
      numbers(`neighbours/${key}.bin`, Int32Array, count * k),
      numbers(`neighbour_distances/${key}.bin`, Float32Array, count * k),
    ]),
  );
  const row = async (key, id) => {
    if (scene.neighbours === "table")
      return (await table(key)).map((all) => Array.from(all.subarray(id * k, (id + 1) * k)));
    const { ids, distances } = await load(`neighbours.json?view=${encodeURIComponent(key)}&id=${id}`);
    return [ids, distances];
  };
  return async (key, id) => {
    if (k === 0) return [];
    const [ids, distances] = await row(key, id);
    return ids.map((other, i) => ({ id: other, distance: distances[i] }));
  };
}
