// The map of a fleet: ranks × steps, findings and replicas.
const columns = data.steps.length;
const patterns = data.patterns.map(runs => {
  const row = new Uint8Array(columns);
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) { row.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return row;
});
const stateOf = (row, column) => patterns[data.rows[row]][column];
const colour = state => data.states[state][theme.matches ? 2 : 1];

function table(target, head, rows) {
  const top = make("tr");
  head.forEach(([name, kind]) => top.append(make("th", kind, name)));
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
  const tip = $("tip");
  canvas.addEventListener("mousemove", event => {
    const cell = canvas.cell(event);
    tip.hidden = !cell;
    if (!cell) return;
    tip.textContent = $("readout").textContent = say(...cell);
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 300)}px`; tip.style.top = `${event.clientY + 16}px`;
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
}

const everyRow = data.ranks.map((_, i) => i);
function drawAll() {
  draw($("all"), everyRow, Math.min(640, Math.max(120, everyRow.length * 14)), false);
  if (data.odd.length) draw($("odd"), data.odd, data.odd.length * 20, true);
}

$("title").textContent = data.title;
data.meta.forEach(([key, value]) => {
  $("meta").append(make("div", "", make("dt", "", key), make("dd", "", value)));
});
const verdict = $("verdict"), first = data.findings[0];
verdict.append(make("h2", "", first ? "First finding" : "Verdict"), make("p", "say", first ? first.message : data.calm));
if (first && first.next) verdict.append(make("p", "hint", `→ ${first.next}`));
verdict.classList.toggle("calm", !first);
$("odd-card").hidden = !data.odd.length;
$("odd-hint").textContent = data.more ? `and ${data.more} more ranks, which the map below shows` : "";
data.states.forEach(([name], i) => {
  const box = make("i"); box.style.background = colour(i); $("states").append(make("li", "", box, name));
});
$("first-step").textContent = `step ${data.steps[0]}`; $("last-step").textContent = `step ${data.last}`;
$("joined").textContent = data.every > 1 ? `${data.every} steps a column, the gravest state shown` : "";
table($("findings"), [["severity"], ["rule"], ["step", "number"], ["what, and what to do next"]], data.findings.map(one => {
  const row = make("tr", one.severity), what = make("td", "", one.message);
  if (one.next) what.append(make("span", "next", `→ ${one.next}`));
  row.append(make("td", "", one.severity), make("td", "", one.rule), make("td", "number", one.step), what);
  return row;
}));
$("findings").hidden = !data.findings.length;
data.notes.forEach(note => $("notes").append(make("li", "", note)));
table($("groups"), [["replicas"], ["ranks", "number"], ["values compared a step", "number"], ["ranks that left", "number"]],
  data.groups.map(one => {
    const row = make("tr");
    row.append(make("td", "", one[0]), ...one.slice(1).map(number => make("td", "number", number)));
    return row;
  }));
drawAll();
follow($("all")); follow($("odd"));
addEventListener("resize", drawAll);
onTheme(() => location.reload());
ready();
