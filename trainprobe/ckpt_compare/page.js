// The page of ckpt-compare: a map of parameters by layers, and all tensors.
const COMPARED = ["identical", "rounding", "differ"];
const number = (x, digits = 3) => (x === null || x === undefined ? "–" : typeof x === "number" && (Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3)) ? x.toExponential(2) : full(x, digits));

// from 1e-9 (a rounding of float32) to 1 (nothing in common)
function heat(log) {
  const t = Math.max(0, Math.min(1, (log + 9) / 9));
  return `hsl(${48 - 44 * t} ${60 + 20 * t}% ${78 - 34 * t}%)`;
}

function mapCell(cell) {
  if (!cell) return el("td", { style: "background: var(--empty); cursor: default" });
  const [name, log, tensor] = cell, nonfinite = name === "differ" && log === null;
  const colour = name === "identical" ? "var(--identical)" : nonfinite ? "var(--nonfinite)" : heat(log ?? -9);
  const note = nonfinite ? ", NaN or infinity on one side" : log === null ? "" : `, relative error ${number(10 ** log)}`;
  const showTensor = () => { $("search").value = tensor; $("filter").value = ""; keepPlace({ q: tensor, only: "all" }); showRows(); $("list").scrollIntoView({ behavior: "smooth", block: "center" }); };
  const look = COMPARED.includes(name) ? { style: `background: ${colour}` } : { class: "lost" };
  return el("td", { ...look, title: `${tensor}\n${name}${note}`, tabindex: 0, onclick: showTensor, onkeydown: (e) => { if (e.key === "Enter") showTensor(); } });
}

function legend() {
  const swatches = [["var(--identical)", "identical"], ["var(--nonfinite)", "NaN or infinity on one side"], ["var(--empty)", "no such tensor"]]
    .map(([colour, text]) => make("span", "", el("i", { style: `background: ${colour}` }), text));
  const ramp = el("i", { class: "ramp", style: `background: linear-gradient(90deg, ${[0, 1, 2, 3, 4].map((k) => heat(-9 + (k * 9) / 4)).join(",")})` });
  return make("div", "legend", ...swatches, make("span", "", make("i", "lost"), "missing or incomplete"), make("span", "", "relative error 1e-9", ramp, "1"));
}

function showMap({ slot, layers, kinds, grid }) {
  const step = Math.ceil(layers.length / 32);
  const head = make("tr", "", make("th"), ...layers.map((n, i) => make("th", "", i % step ? "" : n)));
  const rows = kinds.map((kind, r) => make("tr", "", make("th", "", kind), ...grid[r].map(mapCell)));
  const title = `${slot === "weights" ? "Weights" : `Optimizer, ${slot}`}: parameter by layer`;
  $("maps").append(make("section", "card", make("h2", "", title), make("div", "scroll", make("table", "map", make("thead", "", head), make("tbody", "", ...rows))), legend()));
}

const tensors = new Table($("list"), [
  ["tensor", "name", (r) => r.name], ["verdict", "", (r) => r.verdict], ["rel. error", "number", (r) => r.relative_l2], ["max |a−b|", "number", (r) => r.max_abs],
  ["ulp", "number", (r) => r.max_ulp], ["changed", "number", (r) => r.changed], ["cosine", "number", (r) => r.cos], ["l2", "number", (r) => r.l2],
  ["shape", "", (r) => JSON.stringify(r.shape)], ["dtype", "", (r) => JSON.stringify(r.dtype)],
], (r) => [
  r.name, verdict(r.verdict), number(r.relative_l2), number(r.max_abs), number(r.max_ulp), r.changed === null ? "–" : `${number(100 * r.changed)} %`,
  number(r.cos, 8), number(r.l2), JSON.stringify(r.shape), [...new Set(r.dtype.filter(Boolean))].join(" / "),
], { under: (r) => [r.note, r.max_abs_at && r.max_abs_at.length ? `at ${JSON.stringify(r.max_abs_at)}` : "", r.where].filter(Boolean).join(" · ") });

function showRows() {
  const word = $("search").value.trim().toLowerCase(), only = $("filter").value;
  const found = data.rows.filter((r) => (!only || r.verdict === only) && r.name.toLowerCase().includes(word));
  tensors.show(found);
  $("shown").textContent = `${found.length} of ${data.rows.length}`;
}

data.maps.forEach(showMap);
const found = [...new Set(data.rows.map((r) => r.verdict))];
options($("filter"), [["", "every verdict"], ...found.map((name) => [name, name])], place().only === "all" ? "" : place().only ?? (found.includes("differ") ? "differ" : ""));
$("filter").addEventListener("change", () => { keepPlace({ only: $("filter").value || "all" }); showRows(); });
onKeys();
showRows();
searches(showRows);
ready();
