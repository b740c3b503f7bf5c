// Draws the lines that are to be seen, and no others: a long tree is a tall empty box with a few lines in it.
let ROW = 24; // more where a name needs several lines, on a phone
const INDENT = () => (narrow() ? 5 : 14);
const view = $("view"), heightBox = $("height"), map = $("map");
const pool = [];
let tree = null, selected = -1, sought = "";

function verdictName(line) { return head.verdicts[tree.verdict[line] === PART ? tree.worst[line] : tree.verdict[line]]; }

function makeRow() {
  const row = make("div", "row");
  row.cells = {};
  for (const name of single ? ["a", "far"] : ["a", "far", "b"]) {
    row.cells[name] = make("span", `cell ${name}`);
    row.append(row.cells[name]);
  }
  heightBox.append(row);
  return row;
}

function marked(text) {
  const at = sought ? text.toLowerCase().indexOf(sought) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), make("mark", "", text.slice(at, at + sought.length)), text.slice(at + sought.length)];
}

// On a phone there is no column of B: the line says beside the name of A what is other in B.
function inB(line) {
  const [a, b] = [tree.a[line], tree.b[line]];
  return a === b || single || !narrow() ? "" : a < 0 ? "only in B" : b < 0 ? "only in A" : `in B ${tree.texts[b]}`;
}

function drawSide(cell, line, side) {
  const entry = tree[side][line];
  const part = tree.call[line] < 0, told = part || side === "b" ? "" : inB(line);
  cell.replaceChildren();
  cell.classList.toggle("nothing", !part && entry < 0 && !told);
  if (cell.classList.contains("nothing")) return;
  const indent = make("span", "indent");
  indent.style.width = `${Math.min(tree.depth[line], 30) * INDENT()}px`;
  const fold = make("span", tree.hasChildren(line) ? `fold ${tree.open[line] ? "open" : ""}` : "fold none");
  const other = side === "b" && !part && tree.a[line] !== entry && tree.a[line] >= 0;
  const label = other ? tree.texts[entry] : tree.texts[tree.label[line]];
  cell.append(indent, fold, make("span", `label ${other ? "renamed" : ""}`, ...marked(label), ...(told ? [make("span", "told", ` ${told}`)] : [])));
  if (!other && !told) cell.append(make("span", "aside", ...marked(tree.texts[tree.aside[line]])));
  if (side === "a" && tree.linkOf.has(tree.call[line])) cell.append(make("span", "link", "⇄"));
}

function drawFar(cell, line) {
  cell.replaceChildren();
  const verdict = verdictName(line);
  const part = tree.call[line] < 0;
  const below = tree.grave[line] - (tree.isGrave(line) ? 1 : 0);
  if (!part && !single) {
    const far = tree.far[line];
    cell.append(make("span", "number", far === 0 ? "=" : short(far)));
    const bar = make("i", "bar");
    const reach = far === null || far === 0 ? 0 : typeof far === "string" ? 1 : Math.min(1, Math.max(0.04, (Math.log10(far) + 9) / 9));
    bar.style.width = `${reach * 100}%`;
    cell.append(make("span", reach ? "track" : "track none", bar));
  }
  if (single && !part && tree.far[line] !== null) cell.append(make("span", "number", full(tree.far[line], 6)));
  if (below && tree.hasChildren(line) && !tree.open[line]) {
    const pill = make("span", `pill v-${head.verdicts[tree.graveBelow(line)]}`, String(below));
    pill.title = `${below} differences below`;
    cell.prepend(pill);
  }
  cell.title = part ? "" : verdict;
}

function draw() {
  if (!tree) return;
  const first = Math.max(0, Math.floor(view.scrollTop / ROW) - 4);
  const last = Math.min(tree.lines.length, Math.ceil((view.scrollTop + view.clientHeight) / ROW) + 4);
  while (pool.length < last - first) pool.push(makeRow());
  pool.forEach((row, k) => {
    const line = tree.lines[first + k];
    row.hidden = first + k >= last;
    if (row.hidden) return;
    row.line = line;
    row.className = `row ${tree.call[line] < 0 ? "part" : ""} v-${verdictName(line)} ${line === selected ? "selected" : ""}`;
    row.style.transform = `translateY(${(first + k) * ROW}px)`;
    row.id = `row-${k}`;
    row.setAttribute("role", "treeitem");
    row.setAttribute("aria-level", tree.depth[line] + 1);
    row.setAttribute("aria-selected", line === selected);
    if (tree.hasChildren(line)) row.setAttribute("aria-expanded", Boolean(tree.open[line])); else row.removeAttribute("aria-expanded");
    drawSide(row.cells.a, line, "a");
    drawFar(row.cells.far, line);
    if (!single) drawSide(row.cells.b, line, "b");
    if (line === selected) view.setAttribute("aria-activedescendant", row.id);
  });
  drawWindow();
}

let mapImage = null;
function drawMap() {
  const width = 14, height = view.clientHeight, { context: pen } = sized(map, width, height);
  const n = tree.lines.length, worst = new Uint8Array(height);
  tree.lines.forEach((line, k) => {
    const y = Math.min(height - 1, Math.floor((k / Math.max(n, 1)) * height));
    const code = tree.grave[line] && !tree.open[line] ? Math.max(tree.graveBelow(line), tree.worst[line]) : tree.worst[line];
    worst[y] = Math.max(worst[y], tree.call[line] < 0 ? 0 : code);
  });
  for (let y = 0; y < height; y++) {
    if (!GRAVE.includes(worst[y])) continue;
    pen.fillStyle = css(`--${head.verdicts[worst[y]]}`);
    pen.fillRect(3, y - 1, width - 6, 3);
  }
  mapImage = pen.getImageData(0, 0, map.width, map.height);
}

function drawWindow() {
  if (!mapImage) return;
  const pen = map.getContext("2d"), total = Math.max(view.clientHeight, tree.lines.length * ROW), part = view.clientHeight / total;
  pen.putImageData(mapImage, 0, 0);
  pen.fillStyle = css("--window");
  pen.globalCompositeOperation = "destination-over";
  pen.fillRect(0, view.scrollTop * part, 14, Math.max(4, view.clientHeight * part));
  pen.globalCompositeOperation = "source-over";
}

function layOut() {
  tree.refresh();
  ROW = 24;
  if (narrow()) {
    const wide = (line) => (tree.texts[tree.label[line]].length + (tree.call[line] < 0 ? 0 : inB(line).length)) * 8 / (view.clientWidth - 150 - tree.depth[line] * INDENT());
    ROW = 4 + 20 * Math.min(5, Math.ceil(tree.lines.reduce((most, line) => Math.max(most, wide(line)), 1)));
  }
  view.style.setProperty("--row", `${ROW}px`);
  heightBox.style.height = `${tree.lines.length * ROW}px`;
  drawMap();
  draw();
}

function scrollTo(line, middle) {
  const at = tree.place.get(line);
  if (at === undefined) return;
  const top = at * ROW;
  if (middle) view.scrollTop = top - view.clientHeight * 0.35;
  else if (top < view.scrollTop) view.scrollTop = top;
  else if (top + ROW > view.scrollTop + view.clientHeight) view.scrollTop = top + ROW - view.clientHeight;
  draw();
}
