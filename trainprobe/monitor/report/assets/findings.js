// Where a finding is on the map, and the run at a glance.
let offender;

function firstOffender() {
  if (offender !== undefined) return offender;
  offender = run.findings.find((f) => f.step !== null && f.severity !== "info") ?? null;
  return offender;
}

// Shows on the map what the finding of this number is about, which the address then names.
async function showFinding(number, scroll) {
  const f = run.findings[number - 1];
  if (!f || f.step === null || !run.metrics.length) return;
  const names = (m) => m.rows.includes(f.name) || m.rows.includes(`${f.name}.${f.slot}`);
  const here = run.metrics[heat.metric];
  if (f.name && !names(here)) {
    const at = run.metrics.findIndex(names);
    if (at >= 0) await pickMetric(at);
  }
  const span = Math.max(20, (heat.whole[1] - heat.whole[0]) / 40);
  zoomTo(f.step - span, f.step + span);
  const at = new Map(heat.rows.map((r, i) => [heat.layer.names[r], i])), i = rowOfFinding(f, at);
  if (i !== undefined) setCursor({ i, column: columnAt(heat.layer, f.step) }, true);
  keepHash(`#finding-${number}`);
  if (scroll) $("map").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "start" });
}

function listenFindings() {
  $("findings").addEventListener("click", (event) => {
    const number = event.target.dataset?.finding;
    if (number) { event.preventDefault(); showFinding(number, true); }
  });
  addEventListener("hashchange", toPlace);
}

// The finding, or the metric, steps and row, that the address names.
async function toPlace() {
  const finding = /^#finding-(\d+)$/.exec(location.hash);
  if (finding) return showFinding(Number(finding[1]), false);
  const { metric, view, steps, row, step } = place();
  if (view !== undefined) heat.view = view === "spread" ? view : Number(view);
  if (run.metrics[metric]) await pickMetric(Number(metric));
  const span = /^(\d+)-(\d+)$/.exec(steps ?? "");
  if (span && run.metrics.length) zoomTo(Number(span[1]), Number(span[2]) + 1);
  const i = heat.layer ? heat.rows.findIndex((r) => heat.layer.names[r] === row) : -1;
  if (i >= 0 && step) setCursor({ i, column: columnAt(heat.layer, Number(step)) }, true);
}

async function drawGlance() {
  const box = $("glance");
  const counts = { error: 0, warning: 0, info: 0 };
  for (const f of run.findings) counts[f.severity]++;
  const worst = counts.error ? "error" : counts.warning ? "warning" : run.jump || run.recorded ? "" : "good", first = firstOffender();
  const total = run.findings.length;
  box.append(tile("Findings", total ? show(total) : "none", total ? `${counted(counts.error, "error")}, ${counted(counts.warning, "warning")}` : run.jump || "neither by rules nor by the audit", worst));
  if (first) box.append(tile("First at", `step ${show(first.step)}`, first.name ?? first.rule, first.severity));
  const wanted = [/^(train.)?loss$/i, /grad.*norm/i, /^(lr|learning.rate)/i];
  const chosen = wanted.map((w) => run.scalars.find((s) => w.test(s.name))).filter(Boolean);
  for (const s of run.scalars) if (chosen.length < 3 && !chosen.includes(s)) chosen.push(s);
  for (const scalar of chosen) {
    const { steps, values } = await loadCurve(scalar);
    const card = tile(scalar.name, show(scalar.last ?? null), `from ${show(scalar.first ?? null)}`);
    const canvas = el("canvas", { "aria-hidden": "true" });
    card.append(canvas);
    box.append(card);
    sparks.push({ canvas, steps, values });
  }
  const steps = heat.whole[1] - heat.whole[0];
  if (Number.isFinite(steps)) box.append(tile("Last step", show(Math.max(0, heat.whole[1] - 1)), `from step ${show(heat.whole[0])}`));
  drawSparks();
}

function tile(label, value, aside, tone = "") {
  return el("div", { class: `tile ${tone}` }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "aside", title: aside }, aside));
}

const sparks = [];

function drawSparks() {
  for (const { canvas, steps, values } of sparks) {
    if (!canvas.clientWidth) continue;
    const { context } = sized(canvas, canvas.clientWidth, 30), whole = heat.whole;
    const range = visibleRange([{ steps, values }], whole), f = range.log ? Math.log10 : (v) => v;
    const plot = { left: 1, width: canvas.clientWidth - 2, height: 28, low: f(range.low), high: f(range.high) || 1, f };
    if (plot.high <= plot.low) plot.high = plot.low + 1;
    drawLine(context, plot, whole, { steps, values, hue: 0 });
  }
}

function listTables() {
  for (const { title, columns, rows } of run.tables) {
    const table = make("table");
    $("tables").append(make("article", "card", make("h2", "", title), make("div", "scroll", table)));
    new Table(table, columns.map((name) => [name]), (row) => row).show(rows);
  }
}
