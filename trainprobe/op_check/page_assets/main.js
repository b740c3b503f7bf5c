// The page of op-check: operators, and their results, the gravest first.
const MOST = 300;
const ORDER = ["bug", "suspicious", "not checked", "mode", "rounding", "unspecified", "exact"];
const hidden = new Set();
let all = false;
let allBy = false;

const far = (value) => (typeof value === "number" ? value : value === null ? 0 : value === "nan" ? Infinity : Number(String(value).replace("inf", "Infinity")));
const text = (value, digits = 3) => (typeof value === "number" ? Number(value.toPrecision(digits)).toString() : value ?? "");
const gravity = (result) => ORDER.indexOf(result.verdict);
const sorted = [...data.results].sort((a, b) => gravity(a) - gravity(b) || far(b.bounds) - far(a.bounds));
const verdict = (name) => make("span", `verdict ${name.replace(" ", "-")}`, name);
const cell = (className, ...children) => make("td", className, ...children);

function head(table, columns) {
  const row = make("tr", "", ...columns.map(([name, number]) => make("th", number ? "number" : "", name)));
  table.replaceChildren(make("thead", "", row));
  return table.appendChild(make("tbody", ""));
}

function wanted(result) {
  const sought = $("search").value.trim().toLowerCase();
  const here = `${result.entry} ${result.module} ${result.operator ?? ""}`.toLowerCase();
  return !hidden.has(result.verdict) && (!sought || here.includes(sought));
}

function drawOperators() {
  const groups = new Map();
  for (const result of sorted) {
    const key = `${result.operator} ${result.direction}`;
    if (!groups.has(key)) groups.set(key, { first: result, counts: new Map(), references: new Set() });
    const group = groups.get(key);
    group.counts.set(result.verdict, (group.counts.get(result.verdict) ?? 0) + 1);
    if (result.reference) group.references.add(result.reference);
  }
  const body = head($("operators"), [["operator"], ["direction"], ["judged against"], ["worst, in bounds", true], ["results"]]);
  for (const { first, counts, references } of groups.values()) {
    const told = ORDER.filter((name) => counts.has(name)).map((name) => make("span", "", verdict(name), ` ${counts.get(name)}  `));
    const pick = () => { $("search").value = first.operator; all = false; drawResults(); };
    body.append(el("tr", { onclick: pick }, cell("name", first.operator), cell("", first.direction), cell("", [...references].join(", ")), cell("number", text(first.bounds)), cell("", ...told)));
  }
}

function drawResults() {
  const found = sorted.filter(wanted);
  const columns = [["step"], ["rank"], ["entry"], ["result", true], ["verdict"], ["bounds", true], ["recorded", true], ["belongs", true], ["share", true], ["reason"]];
  const body = head($("results"), columns);
  for (const r of all ? found : found.slice(0, MOST)) {
    const place = r.at && r.at.length ? `at [${r.at.join(", ")}]` : "";
    const again = r.equal_calls ? `and ${r.equal_calls} equal calls` : "";
    const reason = [r.reason, r.note].filter(Boolean).join("; ");
    body.append(make("tr", "", cell("number", String(r.step)), cell("number", String(r.rank)), cell("name", r.entry, make("small", "", [r.module, again].filter(Boolean).join(" · "))), cell("number", String(r.result)), cell("", verdict(r.verdict)), cell("number", text(r.bounds)), cell("number", text(r.got, 9), make("small", "", place)), cell("number", text(r.want, 9)), cell("number", r.share ? `${text(100 * r.share)} %` : ""), cell("reason", reason)));
  }
  $("shown").textContent = `${Math.min(found.length, all ? found.length : MOST)} of ${data.results.length}`;
  $("more").hidden = all || found.length <= MOST;
}

function drawStandard() {
  if (!data.standard) return;
  $("by").hidden = false;
  $("by").parentNode.prepend($("by"));
  $("by").querySelector("h2").textContent = `By the standard ${data.standard.name}`;
  const rank = (status) => ["error", "SKIP", "pass"].indexOf(status);
  const found = [...data.standard.results].sort((a, b) => rank(a.status) - rank(b.status));
  const body = head($("standard"), [["step"], ["rank"], ["entry"], ["result", true], ["standard"], ["status"], ["reason"]]);
  for (const r of allBy ? found : found.slice(0, MOST)) {
    body.append(make("tr", "", cell("number", String(r.step)), cell("number", String(r.rank)), cell("name", r.entry), cell("number", text(r.result)), cell("", r.standard), cell("", verdict(r.status)), cell("reason", r.reason)));
  }
  $("more-by").hidden = allBy || found.length <= MOST;
}

function toggle(name, button) {
  if (!hidden.delete(name)) hidden.add(name);
  button.setAttribute("aria-pressed", String(!hidden.has(name)));
  drawResults();
}

$("sentence").textContent = data.sentence;
$("sentence").dataset.code = data.code;
$("dumps").textContent = data.dumps.map((path, i) => (data.dumps.length > 1 ? `${"AB"[i]}: ${path}` : path)).join("   ");
$("details").hidden = !data.details.length;
$("details").querySelector("summary").textContent = data.details.length === 1 ? "1 remark" : `${data.details.length} remarks`;
$("details").querySelector("ul").append(...data.details.map((line) => make("li", "", line)));
for (const [name, count] of data.outcomes) {
  $("chips").append(el("button", { type: "button", "aria-pressed": "true", onclick: (e) => toggle(name, e.currentTarget) }, verdict(name), ` ${count} calls`));
}
$("search").addEventListener("input", () => { all = false; drawResults(); });
$("more").addEventListener("click", () => { all = true; drawResults(); });
$("more-by").addEventListener("click", () => { allBy = true; drawStandard(); });
document.addEventListener("keydown", (e) => {
  if (e.key === "/" && document.activeElement !== $("search")) { e.preventDefault(); $("search").focus(); }
});
drawOperators();
drawResults();
drawStandard();
ready();
