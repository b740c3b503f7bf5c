// The map of a fleet: ranks × steps, findings and replicas.
const columns = data.steps.length;
const patterns = data.patterns.map(runs => {
  const row = new Uint8Array(columns);
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) { row.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return row;
});
const stateOf = (row, column) => patterns[data.rows[row]][column];
// Draws rows of ranks as bands; a band that joins several ranks shows the gravest state among them.
function draw(canvas, rows, height, labels) {
  const width = canvas.parentElement.clientWidth, ink = css("--ink"), colours = data.states.map(([, colour]) => css(colour));
  const left = labels ? (width < 600 ? 74 : 130) : 0, bands = Math.min(rows.length, Math.max(1, Math.floor(height)));
  canvas.style.height = `${height}px`;
  const { context: pen } = sized(canvas, width, height);
  const tall = height / bands, wide = (width - left) / columns;
  for (let band = 0; band < bands; band++) {
    const from = Math.floor(band * rows.length / bands), to = Math.max(from + 1, Math.floor((band + 1) * rows.length / bands));
    for (let column = 0; column < columns; column++) {
      let worst = 0;
      for (let i = from; i < to; i++) worst = Math.max(worst, stateOf(rows[i], column));
      pen.fillStyle = colours[worst];
      pen.fillRect(left + column * wide, band * tall, Math.ceil(wide) + .5, Math.ceil(tall) + (labels ? -1 : .5));
    }
    if (labels) {
      pen.fillStyle = ink; pen.textBaseline = "middle";
      pen.fillText(`rank ${data.ranks[rows[from]]}`, 0, (band + .5) * tall);
    }
  }
  if (data.first) {
    const place = rows.indexOf(data.first.row);
    if (place >= 0) {
      const y = place / rows.length * height, x = left + data.first.column * wide;
      pen.strokeStyle = ink; pen.lineWidth = 2;
      pen.strokeRect(x - 2, Math.max(1, y - 3), Math.max(wide, 4) + 4, Math.max(tall, 4) + 5);
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
  canvas.addEventListener("mousemove", event => {
    const cell = canvas.cell(event);
    if (!cell) return hideTip();
    $("readout").textContent = say(...cell);
    placeTip(event, say(...cell));
  });
  canvas.addEventListener("mouseleave", hideTip);
}

const everyRow = data.ranks.map((_, i) => i);
function drawAll() {
  draw($("all"), everyRow, Math.min(640, Math.max(120, everyRow.length * 14)), false);
  if (data.odd.length) draw($("odd"), data.odd, data.odd.length * 20, true);
}

fillRunHead(data.title, data.meta);
const first = data.findings[0];
$("verdict").append(make("h2", "", first ? "First finding" : "Verdict"), make("p", "say", first ? first.message : data.calm));
if (first && first.next) $("verdict").append(make("p", "hint", `→ ${first.next}`));
$("verdict").classList.toggle("calm", !first);
$("odd-card").hidden = !data.odd.length;
$("odd-hint").textContent = data.more ? `and ${data.more} more ranks, which the map below shows` : "";
data.states.forEach(([name, colour]) => $("states").append(make("li", "", el("i", { style: `background: var(${colour})` }), name)));
$("first-step").textContent = `step ${data.steps[0]}`; $("last-step").textContent = `step ${data.last}`;
$("joined").textContent = data.every > 1 ? `${data.every} steps a column, the gravest state shown` : "";
new Table($("findings"), [["severity"], ["rule"], ["step", "number", (one) => one.step], ["what, and what to do next", "text"]],
  (one) => [verdict(one.severity), one.rule, one.step, [one.message, one.next ? make("span", "next", `→ ${one.next}`) : ""]]).show(data.findings);
$("findings-card").hidden = !data.findings.length && !data.notes.length;
$("findings").hidden = !data.findings.length;
data.notes.forEach((note) => $("notes").append(make("li", "", note)));
new Table($("groups"), [["replicas"], ["ranks", "number", (one) => one[1]], ["values compared a step", "number", (one) => one[2]], ["ranks that left", "number", (one) => one[3]]],
  (one) => one).show(data.groups);
drawAll();
follow($("all")); follow($("odd"));
addEventListener("resize", drawAll);
onTheme(drawAll);
onKeys();
ready();
