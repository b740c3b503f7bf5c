// The map of a fleet: ranks × steps, findings and replicas.
const columns = data.steps.length;
const patterns = data.patterns.map(runs => {
  const row = new Uint8Array(columns);
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) { row.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return row;
});
const stateOf = (row, column) => patterns[data.rows[row]][column];
let marked = data.first;

// A cell at which nothing was compared is hatched: it is not known to be alike.
function hatched(pen) {
  const tile = new OffscreenCanvas(6, 6), brush = tile.getContext("2d");
  brush.strokeStyle = css("--faint");
  for (const x of [-6, 0, 6]) { brush.moveTo(x, 6); brush.lineTo(x + 6, 0); }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}

// Draws rows of ranks as bands; a band that joins several ranks shows the gravest state among them.
function draw(canvas, rows, height, labels) {
  const width = canvas.parentElement.clientWidth, ink = css("--ink"), colours = data.states.map(([, colour]) => css(colour));
  const left = labels ? (width < 600 ? 74 : 130) : 0, bands = Math.min(rows.length, Math.max(1, Math.floor(height)));
  canvas.style.height = `${height}px`;
  const { context: pen } = sized(canvas, width, height);
  colours[data.states.findIndex(([, colour]) => colour === "--unseen")] = hatched(pen);
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
  if (marked) {
    const at = rows.indexOf(marked.row);
    if (at >= 0) {
      const y = at / rows.length * height, x = left + marked.column * wide;
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
  canvas.addEventListener("click", event => {
    const cell = canvas.cell(event);
    if (cell) { keepPlace({ rank: data.ranks[cell[0]], step: data.steps[cell[1]] }); mark(...cell); }
  });
}

const everyRow = data.ranks.map((_, i) => i);
function drawAll() {
  draw($("all"), everyRow, Math.min(640, Math.max(120, everyRow.length * 14)), false);
  if (data.odd.length) draw($("odd"), data.odd, data.odd.length * 20, true);
}

$("odd-card").hidden = !data.odd.length;
$("odd-hint").textContent = data.more ? `and ${data.more} more ranks, which the map below shows` : "";
$("first-step").textContent = `step ${data.steps[0]}`; $("last-step").textContent = `step ${data.last}`;
$("joined").textContent = data.every > 1 ? `${data.every} steps a column, the gravest state shown` : "";
// The rank and step that the address names.
function mark(row, column) {
  marked = { row, column };
  drawAll();
  $("readout").textContent = say(row, column);
}
function toPlace() {
  const { rank, step } = place(), row = data.ranks.indexOf(Number(rank)), column = data.steps.findLastIndex((one) => one <= step);
  if (row >= 0 && column >= 0) mark(row, column);
}

drawAll();
follow($("all")); follow($("odd"));
toPlace();
addEventListener("hashchange", toPlace);
addEventListener("resize", drawAll);
onTheme(drawAll);
onKeys();
ready();
