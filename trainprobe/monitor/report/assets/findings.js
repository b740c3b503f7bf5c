// What was found, causes first and notes last, and the run at a glance.
let offender;

function firstOffender() {
  if (offender !== undefined) return offender;
  offender = run.findings.find((f) => f.step !== null && f.severity !== "info") ?? null;
  return offender;
}

function listFindings() {
  const list = $("finding-list"), note = (f) => f.severity === "info";
  const order = [...run.findings].sort((a, b) => note(a) - note(b));
  const section = $("findings");
  const quiet = order.every(note);
  if (quiet && run.jump) section.insertBefore(el("p", { id: "jump" }, `${run.jump}.`), $("notes"));
  const none = run.recorded ? `${run.recorded}: no findings in these.` : "No findings.";
  if (!order.length) list.replaceWith(el("p", { class: run.jump || run.recorded ? "" : "calm" }, none));
  list.append(...order.slice(0, 8).map(findingItem));
  if (order.length > 8) {
    const more = el("button", { type: "button", id: "more-findings" }, `show ${show(order.length - 8)} more`);
    more.addEventListener("click", () => { list.append(...order.slice(8).map(findingItem)); more.remove(); });
    section.insertBefore(more, $("notes"));
  }
  $("notes").append(...run.notes.map((text) => el("li", {}, text)));
}

function findingItem(f) {
  const place = [];
  if (f.name) place.push(el("span", {}, el("code", {}, f.name), f.slot ? ` ${f.slot}` : ""));
  if (f.measured !== null) place.push(el("span", {}, "measured ", el("code", {}, show(f.measured))));
  if (f.expected !== null) place.push(el("span", {}, "expected ", el("code", {}, show(f.expected))));
  if (f.floor !== null) place.push(el("span", {}, "noise floor ", el("code", {}, show(f.floor))));
  if (f.step !== null && run.metrics.length) place.push(el("button", { type: "button", class: "show", onclick: () => showFinding(f) }, "show on the map"));
  const all = f.names.length > 1 ? el("details", { class: "names" }, el("summary", {}, `all ${show(f.names.length)} names`), el("code", {}, f.names.join(", "))) : null;
  const body = el("div", {}, el("div", { class: "say" }, f === firstOffender() ? el("span", { class: "first-badge" }, "first") : null, f.message),
    el("div", { class: "where" }, ...place), f.next ? el("div", { class: "next" }, f.next) : null, all);
  return el("li", { class: `finding ${f.severity}` }, el("div", { class: "mark" }, f.rule, el("span", {}, f.when)), body);
}

async function showFinding(f) {
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
  $("map").scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth", block: "start" });
}

async function drawGlance() {
  const box = $("glance");
  const counts = { error: 0, warning: 0, info: 0 };
  for (const f of run.findings) counts[f.severity]++;
  const worst = counts.error ? "error" : counts.warning ? "warning" : run.jump ? "" : "good", first = firstOffender();
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
