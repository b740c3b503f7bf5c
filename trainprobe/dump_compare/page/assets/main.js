// Puts the page together: what stands above the tree, what is chosen, mouse and keys.
const trees = new Map();

function select(line, middle) {
  selected = line;
  if (line >= 0 && !tree.place.has(line)) { tree.reveal(line); layOut(); }
  scrollTo(line, middle && !isInView(line));
  draw();
  countHits();
  showPanel(line);
  keepPlace({ step: head.ranks[tree.index].step, rank: head.ranks[tree.index].rank, line });
}

function isInView(line) {
  const top = (tree.place.get(line) ?? -1) * ROW;
  return top >= view.scrollTop + ROW && top + 2 * ROW <= view.scrollTop + view.clientHeight;
}

async function showRank(index) {
  if (tree && tree.index === index) return;
  if (!trees.has(index)) trees.set(index, new Tree(index, await json(`t${index}`)));
  tree = trees.get(index);
  const { step, rank } = head.ranks[index];
  $("pick-step").value = step;
  fillRanks(step);
  $("pick-rank").value = index;
  fillMicro();
  drawChips();
  selected = -1;
  if (!tree.begun) { tree.begun = true; tree.foldBut(-1); tree.openRoot(); }
  layOut();
  view.scrollTop = 0;
  showPart(-1);
  seek();
  document.documentElement.dataset.shown = index;
}

function fillRanks(step) {
  const here = head.ranks.map((each, i) => ({ ...each, i })).filter((each) => each.step === step);
  options($("pick-rank"), here.map((each) => [each.i, `${each.rank}${mark(each.counts)}`]));
}

function mark(counts) {
  return Object.keys(counts).some((name) => GRAVE.includes(head.verdicts.indexOf(name))) ? " ●" : "";
}

function fillMicro() {
  const all = [...new Set(tree.micro)].filter((micro) => micro >= 0).sort((x, y) => x - y);
  $("label-micro").hidden = all.length < 2;
  options($("pick-micro"), [["", "all"], ...all.map((micro) => [micro, micro])]);
  $("pick-micro").value = tree.chosen ?? "";
}

function drawChips() {
  const counts = head.ranks[tree.index].counts;
  $("chips").replaceChildren(...head.verdicts.filter((name) => counts[name]).reverse().map((name) => {
    const next = () => nextOf((line) => head.verdicts[tree.verdict[line]] === name, 1, name);
    const title = `${MEANS[name] ?? ""} Click: the next one.`.trim();
    return el("button", { type: "button", class: `chip ${verdictClass(name)}`, title, onclick: next }, make("i", "dot"), ` ${counts[name].toLocaleString("en")} ${name === "nonfinite" ? "not finite" : name}`);
  }));
}

function toggle(line) {
  if (!tree.hasChildren(line)) return;
  tree.open[line] = tree.open[line] ? 0 : 1;
  layOut();
}

function move(step) {
  const at = tree.place.get(selected) ?? -1;
  const next = Math.max(0, Math.min(tree.lines.length - 1, at + step));
  if (tree.lines.length) select(tree.lines[next], false);
}

const KEYS = {
  ArrowDown: () => move(1), ArrowUp: () => move(-1), j: () => move(1), k: () => move(-1),
  PageDown: () => move(Math.floor(view.clientHeight / ROW) - 1), PageUp: () => move(1 - Math.floor(view.clientHeight / ROW)),
  Home: () => move(-tree.size), End: () => move(tree.size),
  ArrowRight: () => { if (selected >= 0 && tree.hasChildren(selected)) { if (tree.open[selected]) move(1); else toggle(selected); } },
  ArrowLeft: () => {
    if (selected < 0) return;
    if (tree.open[selected] && tree.hasChildren(selected)) toggle(selected);
    else if (tree.parent[selected] >= 0) select(tree.parent[selected], false);
  },
  Enter: () => { if (selected >= 0) toggle(selected); }, " ": () => { if (selected >= 0) toggle(selected); },
  n: () => nextDifference(1), p: () => nextDifference(-1), f: toFirst, g: followNext,
  z: () => foldAll(), x: () => unfoldAll(),
};

function foldAll() { tree.foldBut(selected); layOut(); if (selected >= 0) scrollTo(selected, true); }

function unfoldAll() {
  if (selected >= 0 && tree.hasChildren(selected)) tree.setAll(selected, true);
  else for (let i = 0; i < tree.size; i++) tree.open[i] = 1;
  layOut();
  if (selected >= 0) scrollTo(selected, false);
}

function listen() {
  view.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  view.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    if (event.target.classList.contains("fold")) toggle(row.line); else select(row.line, false);
  });
  view.addEventListener("dblclick", (event) => { const row = event.target.closest(".row"); if (row) toggle(row.line); });
  map.addEventListener("pointerdown", jump);
  map.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
  onKeys(KEYS);
  search.addEventListener("input", seek);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); nextHit(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { search.value = ""; seek(); view.focus(); }
  });
  $("pick-step").onchange = (event) => pickStep(Number(event.target.value));
  $("pick-rank").onchange = (event) => showRank(Number(event.target.value));
  $("pick-micro").onchange = (event) => { tree.chosen = event.target.value === "" ? null : Number(event.target.value); layOut(); seek(); };
  $("after").onclick = () => nextDifference(1);
  $("before").onclick = () => nextDifference(-1);
  $("fold").onclick = foldAll;
  $("unfold").onclick = unfoldAll;
  $("to-first").onclick = toFirst;
  new ResizeObserver(() => { if (tree) { drawMap(); draw(); } }).observe(view);
  onTheme(() => { drawMap(); draw(); });
  split();
}

function pickStep(step) {
  const rank = head.ranks[tree.index].rank;
  const here = head.ranks.map((each, i) => ({ ...each, i })).filter((each) => each.step === step);
  showRank((here.find((each) => each.rank === rank) ?? here[0]).i);
}

function jump(event) {
  view.scrollTop = (event.offsetY / map.clientHeight) * tree.lines.length * ROW - view.clientHeight / 2;
}

function split() {
  const bar = $("split"), main = document.querySelector("main");
  bar.addEventListener("pointerdown", (event) => { bar.setPointerCapture(event.pointerId); });
  bar.addEventListener("pointermove", (event) => {
    if (!event.buttons) return;
    main.style.setProperty("--panel", `${Math.max(260, Math.min(innerWidth - 360, innerWidth - event.clientX))}px`);
  });
}

// The step, rank and call that the address names.
async function toPlace() {
  const { step, rank, line } = place(), index = head.ranks.findIndex((each) => `${each.step} ${each.rank}` === `${step} ${rank}`);
  if (index < 0) return false;
  await showRank(index);
  if (line >= 0 && line < tree.size) select(Number(line), true);
  return true;
}

async function begin() {
  document.body.classList.toggle("single", single);
  for (const [i, side] of SIDES.entries()) $(`head-${side}`).textContent = single ? "call" : `${"AB"[i]}  ${head.paths[i].split("/").filter(Boolean).at(-1) ?? ""}`;
  $("to-first").hidden = !head.first;
  $("paths").append($("to-first"));
  if (single) { $("head-far").textContent = "norm of the result"; $("after").textContent = "↓ next not finite"; }
  const steps = [...new Set(head.ranks.map((each) => each.step))];
  options($("pick-step"), steps.map((step) => [step, `${step}${head.ranks.some((each) => each.step === step && mark(each.counts)) ? " ●" : ""}`]));
  listen();
  if (!(await toPlace())) {
    await showRank(head.first ? head.first[0] : 0);
    if (head.first) await toFirst(); else view.focus();
  }
  addEventListener("hashchange", toPlace);
  ready();
}

begin();
