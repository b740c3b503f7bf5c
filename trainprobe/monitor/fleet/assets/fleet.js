const data = JSON.parse(document.getElementById("fleet").textContent);
const byId = id => document.getElementById(id);
const columns = data.steps.length;
const patterns = data.patterns.map(runs => {
  const row = new Uint8Array(columns);
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) { row.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return row;
});
const stateOf = (row, column) => patterns[data.rows[row]][column];
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = state => data.states[state][dark.matches ? 2 : 1];

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function table(target, head, rows) {
  const top = element("tr");
  head.forEach(([name, kind]) => top.append(element("th", name, kind)));
  target.append(top, ...rows);
}

// Draws rows of ranks as bands; a band that joins several ranks shows the gravest state among them.
function draw(canvas, rows, height, labels) {
  const width = canvas.parentElement.clientWidth, scale = devicePixelRatio || 1;
  const left = labels ? 130 : 0, bands = Math.min(rows.length, Math.max(1, Math.floor(height)));
  canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const tall = height / bands, wide = (width - left) / columns;
  for (let band = 0; band < bands; band++) {
    const from = Math.floor(band * rows.length / bands), to = Math.max(from + 1, Math.floor((band + 1) * rows.length / bands));
    for (let column = 0; column < columns; column++) {
      let worst = 0;
      for (let i = from; i < to; i++) worst = Math.max(worst, stateOf(rows[i], column));
      pen.fillStyle = colour(worst);
      pen.fillRect(left + column * wide, band * tall, Math.ceil(wide) + .5, Math.ceil(tall) + (labels ? -1 : .5));
    }
    if (labels) {
      pen.fillStyle = getComputedStyle(document.body).color; pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
      pen.fillText(`rank ${data.ranks[rows[from]]}`, 0, (band + .5) * tall);
    }
  }
  if (data.first) {
    const place = rows.indexOf(data.first.row);
    if (place >= 0) {
      const y = place / rows.length * height, x = left + data.first.column * wide;
      pen.strokeStyle = getComputedStyle(document.body).color; pen.lineWidth = 2;
      pen.strokeRect(x - 2, y - 3, Math.max(wide, 4) + 4, Math.max(tall, 4) + 5);
    }
  }
  canvas.cell = event => {
    const box = canvas.getBoundingClientRect();
    const row = rows[Math.min(rows.length - 1, Math.floor((event.clientY - box.top) / box.height * rows.length))];
    const column = Math.floor((event.clientX - box.left - left) / (box.width - left) * columns);
    return column < 0 || column >= columns ? null : [row, column];
  };
}

function say(row, column) {
  const step = data.every > 1 ? `steps ${data.steps[column]} and on` : `step ${data.steps[column]}`;
  return `rank ${data.ranks[row]} (${data.places[row] || "no place"}), ${step}: ${data.states[stateOf(row, column)][0]}`;
}

function follow(canvas) {
  const tip = byId("tip");
  canvas.addEventListener("mousemove", event => {
    const cell = canvas.cell(event);
    tip.hidden = !cell;
    if (!cell) return;
    tip.textContent = byId("readout").textContent = say(...cell);
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 300)}px`; tip.style.top = `${event.clientY + 16}px`;
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
}

const everyRow = data.ranks.map((_, i) => i);
function drawAll() {
  draw(byId("all"), everyRow, Math.min(640, Math.max(120, everyRow.length * 14)), false);
  if (data.odd.length) draw(byId("odd"), data.odd, data.odd.length * 20, true);
}

data.meta.forEach(([key, value]) => {
  const pair = element("div"); pair.append(element("dt", key), element("dd", value)); byId("meta").append(pair);
});
const verdict = byId("verdict"), first = data.findings[0];
verdict.append(element("h2", first ? "First of all" : "Verdict"), element("p", first ? first.message : data.calm, "say"));
if (first && first.next) verdict.append(element("p", `→ ${first.next}`, "hint"));
verdict.classList.toggle("calm", !first);
byId("odd-card").hidden = !data.odd.length;
byId("odd-hint").textContent = data.more ? `and ${data.more} more ranks, which the map below shows` : "";
data.states.forEach(([name], i) => {
  const item = element("li"), box = element("i"); box.style.background = colour(i); item.append(box, name); byId("states").append(item);
});
byId("first-step").textContent = `step ${data.steps[0]}`; byId("last-step").textContent = `step ${data.last}`;
byId("joined").textContent = data.every > 1 ? `${data.every} steps a column, the gravest state shown` : "";
table(byId("findings"), [["severity"], ["rule"], ["step", "number"], ["what, and what to do next"]], data.findings.map(one => {
  const row = element("tr", undefined, one.severity), what = element("td", one.message);
  if (one.next) what.append(element("span", `→ ${one.next}`, "next"));
  row.append(element("td", one.severity), element("td", one.rule), element("td", one.step ?? "", "number"), what);
  return row;
}));
byId("findings").hidden = !data.findings.length;
data.notes.forEach(note => byId("notes").append(element("li", note)));
table(byId("groups"), [["replicas"], ["ranks", "number"], ["values compared a step", "number"], ["ranks that left", "number"]],
  data.groups.map(one => {
    const row = element("tr");
    row.append(element("td", one[0]), ...one.slice(1).map(number => element("td", number, "number")));
    return row;
  }));
drawAll();
follow(byId("all")); follow(byId("odd"));
addEventListener("resize", drawAll);
dark.addEventListener("change", () => location.reload());
document.documentElement.dataset.ready = String(performance.now());
