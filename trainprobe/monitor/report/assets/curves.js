// Curves over steps, linked to the steps that the map shows.
const charts = [];

function addChart(title, series, wide = false) {
  const canvas = el("canvas", { role: "img", "aria-label": title }), now = el("span", { class: "now" }), keys = el("ul");
  const head = el("div", { class: "head" }, el("h2", {}, title), now);
  const card = el("article", { class: wide ? "card curve wide" : "card curve" }, head, canvas, keys);
  $("curves").append(card);
  const chart = { canvas, now, keys, card, series, plot: null };
  charts.push(chart);
  canvas.addEventListener("pointermove", (event) => pointChart(chart, event));
  canvas.addEventListener("pointerleave", () => { hideTip(); now.textContent = ""; drawChart(chart); });
  return chart;
}

function drawCurves() {
  for (const chart of charts) drawChart(chart);
}

function visibleRange(series, [t0, t1]) {
  let low = Infinity, high = -Infinity, least = Infinity;
  const positive = [];
  for (const { steps, values } of series) {
    for (let i = 0; i < steps.length; i++) {
      const v = values[i];
      if (steps[i] < t0 || steps[i] >= t1 || !Number.isFinite(v)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
      if (v > 0 && v < least) least = v;
      if (v > 0 && (i & 7) === 0) positive.push(v);
    }
  }
  if (low > high) [low, high] = [0, 1];
  // Only where a linear axis would press half of the values into its lowest twentieth.
  const middle = positive.sort((a, b) => a - b)[positive.length >> 1];
  const log = low >= 0 && least < Infinity && high / middle > 20;
  return { low: log ? least : low, high, log };
}

function drawChart(chart, at = null) {
  const { canvas, series } = chart, shown = heat.shown;
  if (!canvas.clientWidth) return;
  const width = canvas.clientWidth, height = 190, { context } = sized(canvas, width, height);
  const range = visibleRange(series, shown), f = range.log ? Math.log10 : (v) => v;
  let low = f(range.low), high = f(range.high);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low - margin, high + margin];
  const marks = axisMarks(low, high, range.log), left = Math.max(34, ...marks.map(([, text]) => context.measureText(text).width + 10));
  const plot = { left, width: width - left - 4, height: height - 26, low, high, f };
  chart.plot = plot;
  drawGrid(context, plot, marks);
  drawStepAxis(context, plot, shown, plot.height);
  markFindings(context, plot, shown);
  context.save();
  context.beginPath();
  context.rect(plot.left, 0, plot.width, plot.height);
  context.clip();
  for (const one of series) drawLine(context, plot, shown, one);
  context.restore();
  if (at !== null) drawCrosshair(context, plot, shown, at);
}

function axisMarks(low, high, log) {
  if (!log) return ticks(low, high, 4).map((v) => [v, show(v)]);
  const whole = ticks(Math.ceil(low), Math.floor(high), 4, true).filter((t) => t >= low && t <= high);
  const found = whole.length > 1 ? whole : ticks(low, high, 3);
  return found.map((t) => [t, show(10 ** t, 2)]);
}

function drawGrid(context, plot, marks) {
  context.strokeStyle = css("--line");
  context.fillStyle = css("--muted");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [v, text] of marks) {
    const y = Math.round(yOf(plot, v)) + 0.5;
    context.beginPath();
    context.moveTo(plot.left, y);
    context.lineTo(plot.left + plot.width, y);
    context.stroke();
    context.fillText(text, plot.left - 6, Math.max(6, y));
  }
}

function yOf(plot, v) {
  return plot.height * (1 - (v - plot.low) / (plot.high - plot.low));
}

function markFindings(context, plot, [t0, t1]) {
  const first = firstOffender(), drawn = new Set();
  for (const finding of run.findings) {
    if (finding.step === null || finding.step < t0 || finding.step >= t1) continue;
    const x = Math.round(plot.left + ((finding.step + 0.5 - t0) / (t1 - t0)) * plot.width) + 0.5;
    if (drawn.has(x) && finding !== first) continue;
    drawn.add(x);
    context.strokeStyle = finding.severity === "error" ? css("--error") : css("--warning");
    context.globalAlpha = finding === first ? 0.9 : 0.35;
    context.setLineDash(finding === first ? [] : [3, 3]);
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, plot.height);
    context.stroke();
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
}

// A line through the finite values; a value that is not finite breaks it and leaves a cross at the top.
function drawLine(context, plot, [t0, t1], { steps, values, hue }) {
  const scale = plot.width / (t1 - t0), crosses = [], dots = [];
  let pen = false, from = null;
  context.strokeStyle = context.fillStyle = lineColour(hue);
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  const first = Math.max(0, lowerBound(steps, t0) - 1), last = Math.min(steps.length - 1, lowerBound(steps, t1));
  for (let i = first; i <= last; i++) {
    const x = plot.left + (steps[i] + 0.5 - t0) * scale, v = plot.f(values[i]);
    if (values[i] === null) continue;
    if (!Number.isFinite(v)) {
      if (!Number.isFinite(values[i])) crosses.push(x);
      if (from && !from.joined) dots.push(from);
      pen = false;
      from = null;
      continue;
    }
    const y = yOf(plot, v);
    if (pen) { context.lineTo(x, y); from.joined = true; } else context.moveTo(x, y);
    from = { x, y, joined: pen };
    pen = true;
  }
  context.stroke();
  if (from && !from.joined) dots.push(from);
  for (const { x, y } of dots) { context.beginPath(); context.arc(x, y, 2.2, 0, 7); context.fill(); }
  drawCrosses(context, crosses);
}

function drawCrosses(context, crosses) {
  context.strokeStyle = css("--error");
  context.lineWidth = 1.6;
  let before = -Infinity;
  for (const x of crosses) {
    if (x - before < 7) continue;
    before = x;
    context.beginPath();
    context.moveTo(x - 3, 4);
    context.lineTo(x + 3, 10);
    context.moveTo(x + 3, 4);
    context.lineTo(x - 3, 10);
    context.stroke();
  }
}

function drawCrosshair(context, plot, [t0, t1], t) {
  const x = plot.left + ((t + 0.5 - t0) / (t1 - t0)) * plot.width;
  context.strokeStyle = css("--muted");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, plot.height);
  context.stroke();
}

function lowerBound(steps, t) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < t) low = middle + 1;
    else high = middle;
  }
  return low;
}

function pointChart(chart, event) {
  const { plot, series, canvas, now } = chart, [t0, t1] = heat.shown;
  const main = series[0];
  if (!plot || !main || !main.steps.length) return;
  const t = t0 + ((event.clientX - canvas.getBoundingClientRect().left - plot.left) / plot.width) * (t1 - t0);
  const i = Math.max(0, Math.min(main.steps.length - 1, lowerBound(main.steps, t - 0.5)));
  drawChart(chart, main.steps[i]);
  const lines = series.map((one) => {
    const k = lowerBound(one.steps, main.steps[i]);
    return el("div", {}, series.length > 1 ? `${one.label}  ` : "", el("b", {}, show(one.steps[k] === main.steps[i] ? one.values[k] : null)));
  });
  placeTip(event, ...lines, el("div", { class: "dim" }, `step ${show(main.steps[i])}`));
  now.textContent = series.length === 1 ? `step ${show(main.steps[i])}   ${show(main.values[i])}` : `step ${show(main.steps[i])}`;
}

// The chosen rows of the map as curves.
let rowChart = null;

function togglePin(name) {
  const at = heat.pinned.indexOf(name);
  if (at >= 0) heat.pinned.splice(at, 1);
  else heat.pinned.push(name);
  if (heat.pinned.length > LINES.light.length) heat.pinned.shift();
  drawPinned();
}

function drawPinned() {
  const { layer } = heat;
  if (!rowChart || !layer) return;
  const titled = `${layer.metric.name}, ${layer.metric.statistic}: chosen rows`;
  rowChart.card.querySelector("h2").textContent = titled;
  const rows = heat.pinned.map((name) => layer.names.indexOf(name));
  rowChart.series = rows.flatMap((row, k) => (row < 0 ? [] : [rowSeries(layer, row, k)]));
  rowChart.keys.replaceChildren(...rowChart.series.map(({ label, hue }) => el("li", {}, el("i", { style: `background:${lineColour(hue)}` }), label,
    el("button", { type: "button", "aria-label": `remove ${label}`, onclick: () => togglePin(label) }, "×"))));
  drawChart(rowChart);
}

function rowSeries(layer, row, hue) {
  const values = new Array(layer.columns);
  for (let c = 0; c < layer.columns; c++) values[c] = valueOf(layer, row, layer.codes[row * layer.columns + c]);
  return { label: layer.names[row], steps: layer.begins, values, hue };
}
