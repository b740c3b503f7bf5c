// The map of layer × step: what is picked, how it is drawn, what the pointer and the keys do.
const heat = {
  canvas: $("heat"), over: $("heat-over"),
  metric: 0, view: 0, scale: "log", filter: "", layer: null, rows: [], table: null, colours: null,
  whole: [0, 1], shown: [0, 1], cursor: null, drag: null, pinned: [], plot: null,
};

async function loadHeat() {
  const metric = run.metrics[heat.metric];
  const ticket = (heat.ticket = {});
  const layer = await loadLayer(metric, heat.view);
  if (ticket !== heat.ticket) return;
  heat.layer = layer;
  heat.cursor = null;
  filterRows();
  recolour();
}

function filterRows() {
  const words = heat.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const all = heat.layer.names.map((name, i) => [name.toLowerCase(), i]);
  const kept = all.filter(([name]) => words.every((w) => name.includes(w))).map(([, i]) => i);
  heat.rows = kept;
}

function recolour() {
  heat.table = shades(heat.layer, heat.scale);
  heat.colours = palette(heat.layer);
  drawHeat();
  drawBrush();
  drawLegend();
  drawPinned();
}

function heatHeight(rows) {
  const each = Math.max(2, Math.min(22, Math.floor(620 / Math.max(1, rows))));
  return Math.max(44, Math.min(900, rows * each));
}

function drawHeat() {
  const { canvas, layer, rows } = heat;
  if (!layer || !canvas.clientWidth) return;
  const width = canvas.clientWidth, inner = heatHeight(rows.length), height = inner + 24;
  canvas.style.height = `${height}px`;
  const { context, ratio } = sized(canvas, width, height);
  heat.labels = rowLabels(context, width * (width < 640 ? 0.3 : 0.2) - 12);
  const widest = Math.max(...rows.slice(0, 400).map((r) => context.measureText(heat.labels[r]).width), 20);
  const left = Math.round(Math.min(widest + 12, width * (width < 640 ? 0.3 : 0.2)));
  canvas.dataset.left = left;
  heat.plot = { left, top: 0, width: width - left, height: inner };
  if (rows.length) {
    const image = context.createImageData(Math.round((width - left) * ratio), Math.round(inner * ratio));
    paint(image, layer, rows, heat.table, heat.colours, ...heat.shown);
    context.putImageData(image, Math.round(left * ratio), 0);
  }
  drawRowNames(context);
  drawStepAxis(context, heat.plot, heat.shown, inner);
  const which = layer.metric.views[heat.view]?.label ?? "largest over smallest rank";
  canvas.setAttribute("aria-label", `${layer.metric.name}, ${layer.metric.statistic}, ${which}: ${rows.length} rows, steps ${show(heat.shown[0])} to ${show(Math.floor(heat.shown[1] - 1))}`);
  drawOver();
}

// The names, without the beginning and the end that all of them share where the room is short.
function rowLabels(context, room) {
  const names = heat.layer.names;
  if (names.length < 2 || names.every((n) => context.measureText(n).width <= room)) return names;
  const parts = names.map((n) => n.split("."));
  const shortest = Math.min(...parts.map((p) => p.length)) - 1;
  let head = 0, tail = 0;
  while (head < shortest && parts.every((p) => p[head] === parts[0][head])) head++;
  while (tail < shortest - head && parts.every((p) => p.at(-1 - tail) === parts[0].at(-1 - tail))) tail++;
  return parts.map((p) => p.slice(head, p.length - tail).join("."));
}

function drawRowNames(context) {
  const { left, height } = heat.plot, each = height / heat.rows.length;
  const every = Math.max(1, Math.ceil(13 / each));
  context.fillStyle = css("--muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let i = every >> 1; i < heat.rows.length; i += every) {
    context.fillText(fitted(context, heat.labels[heat.rows[i]], left - 10), left - 7, Math.max(6, (i + 0.5) * each));
  }
  if (!heat.rows.length) {
    context.textAlign = "left";
    context.fillText(`no row's name contains “${heat.filter}”`, left + 8, height / 2);
  }
}

function drawStepAxis(context, plot, [t0, t1], top) {
  context.fillStyle = css("--muted");
  context.strokeStyle = css("--line");
  context.textBaseline = "top";
  for (const t of ticks(t0, t1 - 1e-6, Math.max(2, plot.width / 110), true)) {
    const x = plot.left + ((t + 0.5 - t0) / (t1 - t0)) * plot.width;
    const text = show(t), half = context.measureText(text).width / 2;
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, top + 4);
    context.stroke();
    context.textAlign = "left";
    context.fillText(text, Math.max(plot.left - 2, Math.min(plot.left + plot.width - 2 * half, x - half)), top + 8);
  }
}

function drawOver() {
  const { over, canvas, plot, shown } = heat;
  if (!plot) return;
  const { context } = sized(over, canvas.clientWidth, canvas.clientHeight);
  const xOf = (t) => plot.left + ((t - shown[0]) / (shown[1] - shown[0])) * plot.width;
  drawMarks(context, xOf);
  if (heat.drag && heat.drag.moved) {
    const [a, b] = [xOf(heat.drag.from), xOf(heat.drag.to)].sort((p, q) => p - q);
    context.fillStyle = "rgba(255,255,255,.25)";
    context.strokeStyle = "#fff";
    context.fillRect(a, 0, b - a, plot.height);
    context.strokeRect(a + 0.5, 0.5, b - a - 1, plot.height - 1);
  }
  if (heat.cursor) {
    const { i, column } = heat.cursor, each = plot.height / heat.rows.length;
    const a = Math.max(plot.left, xOf(heat.layer.begins[column])), b = Math.max(a + 2, xOf(heat.layer.ends[column]));
    for (const [colour, line] of [["#000", 3], ["#fff", 1.2]]) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.strokeRect(a - 1, i * each - 0.5, b - a + 2, Math.max(3, each) + 1);
    }
  }
}

// A ring at each finding that has a place on this map; the first offender's ring carries a flag.
function drawMarks(context, xOf) {
  const { plot, layer, rows, shown } = heat, first = firstOffender();
  const at = new Map(rows.map((r, i) => [layer.names[r], i])), each = plot.height / rows.length;
  const seen = new Set();
  for (const finding of run.findings) {
    if (finding.step === null || finding.step < shown[0] || finding.step >= shown[1]) continue;
    const x = xOf(finding.step + 0.5), i = rowOfFinding(finding, at), spot = `${Math.round(x / 6)}:${i}`;
    if (i === undefined || (seen.has(spot) && finding !== first)) continue;
    seen.add(spot);
    const y = (i + 0.5) * each;
    ring(context, x, y, finding === first ? 8 : 5, finding.severity === "error" ? css("--error") : css("--warning"));
    if (finding === first) flag(context, x, y, `first: ${finding.rule}`);
  }
}

function ring(context, x, y, radius, colour) {
  for (const [stroke, line] of [["#fff", 4.5], [colour, 2]]) {
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.strokeStyle = stroke;
    context.lineWidth = line;
    context.stroke();
  }
}

function flag(context, x, y, text) {
  const width = context.measureText(text).width + 12, { left, height } = heat.plot;
  const a = x - 14 - width > left ? x - 14 - width : x + 14;
  const b = Math.max(0, Math.min(height - 18, y - 9));
  context.fillStyle = css("--error");
  context.beginPath();
  context.roundRect(a, b, width, 18, 4);
  context.fill();
  context.fillStyle = css("--card");
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, a + 6, b + 9.5);
}

function rowOfFinding(finding, at) {
  if (!finding.name) return undefined;
  return at.get(finding.name) ?? at.get(`${finding.name}.${finding.slot}`);
}

function locate(event) {
  const box = heat.canvas.getBoundingClientRect(), { plot, shown, rows, layer } = heat;
  const x = Math.max(0, Math.min(plot.width - 0.01, event.clientX - box.left - plot.left)), y = event.clientY - box.top;
  const t = shown[0] + (x / plot.width) * (shown[1] - shown[0]);
  const i = Math.max(0, Math.min(rows.length - 1, Math.floor((y / plot.height) * rows.length)));
  return { t, i, column: columnAt(layer, t), inside: y >= 0 && y < plot.height && event.clientX - box.left >= plot.left };
}

// The column whose steps hold t, or the last one before it.
function columnAt(layer, t) {
  let low = 0, high = layer.columns - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (layer.begins[middle] <= t) low = middle;
    else high = middle - 1;
  }
  return low;
}

function describeCell({ i, column }) {
  const { layer, rows } = heat, row = rows[i], code = layer.codes[row * layer.columns + column];
  const from = layer.begins[column], to = from + (layer.every > 1 ? layer.every - 1 : 0);
  const value = valueOf(layer, row, code), approximate = code >= LOWEST && code <= HIGHEST ? "≈ " : "";
  const unit = layer.scale === "ratio" ? " × (largest over smallest rank)" : "";
  return { name: layer.names[row], step: to > from ? `steps ${show(from)}–${show(to)}` : `step ${show(from)}`, value: approximate + show(value, 3) + unit };
}

function setCursor(cell, announce) {
  heat.cursor = cell;
  drawOver();
  if (cell && announce) {
    const { name, step, value } = describeCell(cell);
    $("readout").textContent = `${name}   ${step}   ${value}`;
  }
}

function zoomTo(from, to) {
  const [low, high] = heat.whole, least = Math.min(high - low, 4);
  let a = Math.max(low, Math.min(from, to)), b = Math.min(high, Math.max(from, to));
  if (b - a < least) [a, b] = [Math.max(low, Math.min(high - least, (a + b - least) / 2)), 0];
  if (b === 0) b = a + least;
  heat.shown = [a, b];
  $("reset").disabled = a <= low && b >= high;
  drawHeat();
  drawBrush();
  drawCurves();
  keepPlace({ steps: $("reset").disabled ? "" : `${Math.floor(heat.shown[0])}-${Math.ceil(heat.shown[1]) - 1}` });
}

function listenHeat() {
  const { canvas } = heat;
  canvas.addEventListener("pointerdown", (event) => {
    if (!heat.layer || event.button !== 0 || !heat.rows.length) return;
    const cell = locate(event);
    if (!cell.inside) return;
    canvas.setPointerCapture(event.pointerId);
    heat.drag = { from: cell.t, to: cell.t, x: event.clientX, moved: false, cell };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!heat.layer || !heat.rows.length) return;
    const cell = locate(event);
    if (heat.drag) Object.assign(heat.drag, { to: cell.t, moved: heat.drag.moved || Math.abs(event.clientX - heat.drag.x) > 4 });
    if (!cell.inside && !heat.drag) return leaveHeat();
    setCursor(cell, true);
    const { name, step, value } = describeCell(cell);
    placeTip(event, el("b", {}, value), el("div", {}, name), el("div", { class: "dim" }, step));
  });
  canvas.addEventListener("pointerup", () => {
    const drag = heat.drag;
    heat.drag = null;
    if (drag?.moved) zoomTo(drag.from, drag.to);
    else if (drag) {
      keepCell(drag.cell);
      togglePin(heat.layer.names[heat.rows[drag.cell.i]]);
    }
  });
  canvas.addEventListener("pointercancel", () => { heat.drag = null; drawOver(); });
  canvas.addEventListener("pointerleave", leaveHeat);
  canvas.addEventListener("dblclick", () => zoomTo(...heat.whole));
  canvas.addEventListener("keydown", heatKey);
}

function keepCell(cell) {
  keepPlace({ row: heat.layer.names[heat.rows[cell.i]], step: heat.layer.begins[cell.column] });
}

function leaveHeat() {
  hideTip();
  setCursor(null, false);
}

function heatKey(event) {
  if (!heat.layer || !heat.rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const { shown, layer, rows } = heat, far = event.shiftKey ? 10 : 1;
  const cell = heat.cursor ?? { i: 0, column: columnAt(layer, shown[0]) };
  const moves = { ArrowLeft: [0, -far], ArrowRight: [0, far], ArrowUp: [-far, 0], ArrowDown: [far, 0] };
  const middle = (layer.begins[cell.column] + layer.ends[cell.column]) / 2, span = shown[1] - shown[0];
  if (event.key in moves) {
    const [di, dc] = moves[event.key];
    const next = { i: Math.max(0, Math.min(rows.length - 1, cell.i + di)), column: Math.max(0, Math.min(layer.columns - 1, cell.column + dc)) };
    const t = layer.begins[next.column];
    if (t < shown[0] || t >= shown[1]) zoomTo(t - span / 2, t + span / 2);
    setCursor(next, true);
    keepCell(next);
  } else if (event.key === "+" || event.key === "=") zoomTo(middle - span / 4, middle + span / 4);
  else if (event.key === "-") zoomTo(middle - span, middle + span);
  else if (event.key === "0" || event.key === "Escape") zoomTo(...heat.whole);
  else if (event.key === "Enter") togglePin(layer.names[rows[cell.i]]);
  else return;
  event.preventDefault();
}

function drawLegend() {
  const { layer, scale } = heat, ramps = el("canvas", { width: 200, height: 10 });
  const context = ramps.getContext("2d"), image = context.createImageData(200, 10), out = new Uint32Array(image.data.buffer);
  for (let i = 0; i < out.length; i++) out[i] = heat.colours.pixels[LOWEST + Math.round(((i % 200) / 199) * (HIGHEST - LOWEST))];
  context.putImageData(image, 0, 0);
  const [low, high] = layer.domain.map((t) => show(numberOf(layer, t), 2));
  const ends = scale === "row" ? ["low for its row", "high for its row"] : layer.scale === "ratio" ? ["ranks agree", `× ${high}`] : [low, high];
  const ramp = el("span", { class: "ramp" }, ends[0], ramps, ends[1]);
  const kinds = [["NaN", NOT_A_NUMBER], ["infinite", INFINITE], ["nothing recorded", 0]];
  if (layer.scale === "log") kinds.splice(2, 0, ["exactly zero", ZERO]);
  $("legend").replaceChildren(ramp, ...kinds.map(([text, code]) => el("span", { class: "swatch" }, swatch(code), text)));
}

function swatch(code) {
  const canvas = el("canvas", { width: 16, height: 12 }), context = canvas.getContext("2d"), image = context.createImageData(16, 12);
  const out = new Uint32Array(image.data.buffer), line = new Uint8Array(16).fill(code);
  for (let y = 0; y < 12; y++) fill(out, y * 16, line, y, heat.colours);
  context.putImageData(image, 0, 0);
  return canvas;
}
