// Colours. Sequential: viridis (van der Walt and Smith, 2015), perceptually uniform and readable without red-green vision.
// Signed data: blue to white to orange. Curves: the palette of Okabe and Ito. NaN and infinity are patterns as well as colours.
const VIRIDIS = ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"];
const SIGNED = ["08306b", "2171b5", "6baed6", "c6dbef", "f4f4f2", "fdd9b5", "f69a4c", "d65f0e", "7f2704"];
const LINES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a"],
  dark: ["#56b4e9", "#f58a3c", "#2fc79a", "#e59ac6", "#f0c04a", "#8aa9ff", "#b4b4b4"],
};

function lineColour(i) {
  const set = theme.matches ? LINES.dark : LINES.light;
  return set[i % set.length];
}

function rgb(hex) {
  const n = parseInt(hex.replace("#", ""), 16);
  return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
}

function pixel([r, g, b]) {
  return (255 << 24) | (b << 16) | (g << 8) | r;
}

function ramp(anchors, u) {
  const at = Math.max(0, Math.min(1, u)) * (anchors.length - 1), i = Math.min(anchors.length - 2, Math.floor(at));
  const a = rgb(anchors[i]), b = rgb(anchors[i + 1]);
  return a.map((v, k) => Math.round(v + (b[k] - v) * (at - i)));
}

// 256 pixels for shades 0 … 255 in the order of the codes, plus the second colour of each pattern.
function palette(layer) {
  const anchors = layer.scale === "symlog" ? SIGNED : VIRIDIS;
  const pixels = new Uint32Array(256);
  for (let s = LOWEST; s <= HIGHEST; s++) pixels[s] = pixel(ramp(anchors, (s - LOWEST) / (HIGHEST - LOWEST)));
  pixels[0] = pixel(rgb(css("--void")));
  pixels[1] = pixels[INFINITE] = pixel([255, 255, 255]);
  pixels[ZERO] = pixel([0, 0, 0]);
  pixels[NOT_A_NUMBER] = pixel(rgb(css("--nonfinite")));
  return { pixels, voidLine: pixel(rgb(css("--void-line"))), nanDark: pixel([40, 0, 20]), infiniteDark: pixel([200, 70, 0]) };
}

// Table [rows × 256] from a row's code to its shade, by the colour scale: "log", "linear" or "row".
function shades(layer, scale) {
  const table = new Uint8Array(layer.names.length * 256);
  const [low, high] = layer.domain, linearLow = numberOf(layer, low), linearHigh = numberOf(layer, high);
  for (let row = 0; row < layer.names.length; row++) {
    const k = layer.knots[row], base = row * 256;
    for (let code = LOWEST; code <= HIGHEST; code++) {
      const t = tOf(layer, row, code);
      let u = (t - low) / (high - low);
      if (scale === "linear") u = (numberOf(layer, t) - linearLow) / (linearHigh - linearLow);
      if (scale === "row") u = k[2] > k[1] ? (t - k[1]) / (k[2] - k[1]) : 0.5;
      table[base + code] = LOWEST + Math.round(Math.max(0, Math.min(1, u)) * (HIGHEST - LOWEST));
    }
    for (const code of [1, ZERO, INFINITE, NOT_A_NUMBER]) table[base + code] = code;
  }
  return table;
}

// Paint rows of a layer over the steps [t0, t1] into an image; a cell that is not finite is never thinner than 3 pixels.
function paint(image, layer, rows, table, colours, t0, t1) {
  const { width, height } = image, out = new Uint32Array(image.data.buffer);
  const edges = columnEdges(layer, width, t0, t1);
  const lines = new Map(), merged = new Uint8Array(width);
  for (let y = 0; y < height; y++) {
    const r0 = Math.floor((y * rows.length) / height), r1 = Math.max(r0 + 1, Math.floor(((y + 1) * rows.length) / height));
    let line = lines.get(r0);
    if (!line || r1 > r0 + 1) {
      merged.fill(0);
      for (let r = r0; r < r1; r++) mergeRow(merged, layer, rows[r], table, edges);
      widen(merged);
      line = merged.slice();
      lines.clear();
      lines.set(r0, line);
    }
    fill(out, y * width, line, y, colours);
  }
}

function columnEdges(layer, width, t0, t1) {
  const edges = new Int32Array(width * 2), { begins, ends, columns } = layer;
  let first = 0;
  for (let x = 0; x < width; x++) {
    const from = t0 + ((t1 - t0) * x) / width, to = t0 + ((t1 - t0) * (x + 1)) / width;
    while (first < columns && ends[first] <= from) first++;
    let last = first;
    while (last < columns && begins[last] < to) last++;
    edges[2 * x] = first;
    edges[2 * x + 1] = last;
  }
  return edges;
}

function mergeRow(merged, layer, row, table, edges) {
  const codes = layer.codes, base = row * layer.columns, shade = row * 256;
  for (let x = 0; x < merged.length; x++) {
    let worst = 0, least = HIGHEST;
    for (let c = edges[2 * x]; c < edges[2 * x + 1]; c++) {
      const code = codes[base + c];
      if (code > worst) worst = code;
      if (code > 0 && code < least) least = code;
    }
    if (layer.low && worst >= 1 && worst <= HIGHEST) worst = least;
    const s = table[shade + worst];
    if (s > merged[x]) merged[x] = s;
  }
}

function widen(line) {
  for (let x = 0; x < line.length; x++) {
    if (line[x] < INFINITE) continue;
    const code = line[x];
    if (x > 0 && line[x - 1] < INFINITE) line[x - 1] = code;
    if (x + 1 < line.length && line[x + 1] < INFINITE) line[++x] = code;
  }
}

function fill(out, offset, line, y, colours) {
  const { pixels, voidLine, nanDark, infiniteDark } = colours;
  for (let x = 0; x < line.length; x++) {
    const s = line[x];
    let p = pixels[s];
    if (s === 0) p = (x + y) % 7 === 0 ? voidLine : p;
    else if (s === NOT_A_NUMBER) p = ((x >> 1) + (y >> 1)) % 4 === 0 ? nanDark : p;
    else if (s === INFINITE || s === 1) p = (x - y + 8192) % 6 < 3 ? infiniteDark : p;
    out[offset + x] = p;
  }
}
