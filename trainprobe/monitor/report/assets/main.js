// Put the page together, and redraw it when its size or the colour scheme changes.
const pick = Object.fromEntries(["metric", "statistic", "view", "scale", "rows"].map((k) => [k, $(`pick-${k}`)]));

function statisticsOf(name) {
  return run.metrics.map((m, i) => [i, m]).filter(([, m]) => m.name === name).map(([i, m]) => [i, m.statistic]);
}

async function pickMetric(at) {
  const before = run.metrics[heat.metric], metric = run.metrics[at];
  heat.metric = at;
  const views = metric.views.map((v, i) => [i, v.label]);
  if (metric.spread) views.splice(2, 0, ["spread", "largest ÷ smallest"]);
  if (!views.some(([v]) => v === heat.view) || before.views.length !== metric.views.length) heat.view = 0;
  const names = [...new Set(run.metrics.map((m) => m.name))];
  options(pick.metric, names.map((n) => [n, n]), metric.name);
  options(pick.statistic, statisticsOf(metric.name), at);
  options(pick.view, views, heat.view);
  options(pick.scale, [["log", metric.scale === "symlog" ? "signed log" : "log"], ["linear", "linear"], ["row", "within each row"]], heat.scale);
  await loadHeat();
}

function listenPicks() {
  pick.metric.addEventListener("change", () => {
    const choices = statisticsOf(pick.metric.value), same = run.metrics[heat.metric].statistic;
    picked((choices.find(([, s]) => s === same) ?? choices[0])[0]);
  });
  pick.statistic.addEventListener("change", () => picked(Number(pick.statistic.value)));
  pick.view.addEventListener("change", () => {
    heat.view = pick.view.value === "spread" ? "spread" : Number(pick.view.value);
    keepPlace({ view: heat.view });
    loadHeat();
  });
  pick.scale.addEventListener("change", () => { heat.scale = pick.scale.value; recolour(); });
  pick.rows.addEventListener("input", () => { heat.filter = pick.rows.value; heat.cursor = null; filterRows(); drawHeat(); drawBrush(); });
  $("reset").addEventListener("click", () => zoomTo(...heat.whole));
}

function picked(metric) {
  keepPlace({ metric });
  pickMetric(metric);
}

async function findWhole() {
  let low = Infinity, high = -Infinity;
  for (const { steps } of [...run.metrics, ...run.scalars]) {
    if (!steps.count) continue;
    const numbers = "start" in steps ? [steps.start, steps.start + (steps.count - 1) * steps.stride] : await stepNumbers(steps);
    low = Math.min(low, numbers[0]);
    high = Math.max(high, numbers[numbers.length - 1]);
  }
  heat.whole = low <= high ? [low, high + 1] : [0, 1];
  heat.shown = [...heat.whole];
}

function firstPins() {
  const rows = run.metrics[heat.metric].rows, first = firstOffender();
  const named = first && (rows.includes(first.name) ? first.name : rows.includes(`${first.name}.${first.slot}`) ? `${first.name}.${first.slot}` : null);
  const spots = [0, rows.length >> 1, rows.length - 1].map((i) => rows[i]);
  heat.pinned = [...new Set([...(named ? [named] : []), ...spots])];
}

function redraw() {
  if (heat.layer) recolour();
  drawCurves();
  drawSparks();
}

async function start() {
  onKeys();
  await findWhole();
  if (run.metrics.length) {
    listenPicks();
    listenHeat();
    listenBrush();
    firstPins();
    rowChart = addChart("", [], true);
    await pickMetric(0);
  } else $("map").remove();
  for (const scalar of run.scalars) addChart(scalar.name, [{ ...(await loadCurve(scalar)), hue: 0 }]);
  drawCurves();
  await drawGlance();
  listTables();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  onTheme(redraw);
  await toPlace();
  listenFindings();
  ready();
}

start();
