// The page of op-check: operators, and their results, the gravest first.
const ORDER = ["bug", "suspicious", "not checked", "mode", "rounding", "unspecified", "exact"];
const hidden = new Set();
const gravity = (result) => ORDER.indexOf(result.verdict);
const far = (value) => Math.max(0, Number(sortKey(value)));
const sorted = [...data.results].sort((a, b) => gravity(a) - gravity(b) || far(b.bounds) - far(a.bounds));

const operators = new Table($("operators"), [["operator", "name"], ["direction"], ["judged against"], ["worst, in bounds", "number"], ["results"]],
  ({ first, counts, references }) => [first.operator, first.direction, [...references].join(", "), full(first.bounds, 3),
    ORDER.filter((name) => counts.has(name)).map((name) => make("span", "counts", verdict(name), ` ${counts.get(name)}`))],
  { pick: ({ first }) => { $("search").value = first.operator; showResults(); } });

const results = new Table($("results"),
  [["entry", "name"], ["verdict"], ["bounds", "number", (r) => r.bounds], ["recorded", "number"], ["belongs", "number"], ["share", "number", (r) => r.share], ["result", "number"], ["step", "number", (r) => r.step], ["rank", "number", (r) => r.rank], ["reason", "text"]],
  (r) => [
    [r.entry, make("small", "", [r.module, r.equal_calls ? `and ${r.equal_calls} equal calls` : ""].filter(Boolean).join(" · "))],
    verdict(r.verdict), full(r.bounds, 3), [full(r.got), make("small", "", r.at && r.at.length ? `at [${r.at.join(", ")}]` : "")], full(r.want),
    r.share ? `${full(100 * r.share, 3)} %` : "", full(r.result), r.step, r.rank, [r.reason, r.note].filter(Boolean).join("; "),
  ], { most: 300 });

function showOperators() {
  const groups = new Map();
  for (const result of sorted) {
    const key = `${result.operator} ${result.direction}`;
    if (!groups.has(key)) groups.set(key, { first: result, counts: new Map(), references: new Set() });
    const group = groups.get(key);
    group.counts.set(result.verdict, (group.counts.get(result.verdict) ?? 0) + 1);
    if (result.reference) group.references.add(result.reference);
  }
  operators.show([...groups.values()]);
}

function showResults() {
  const sought = $("search").value.trim().toLowerCase();
  const found = sorted.filter((r) => !hidden.has(r.verdict) && `${r.entry} ${r.module} ${r.operator ?? ""}`.toLowerCase().includes(sought));
  results.show(found);
  $("shown").textContent = `${found.length} of ${data.results.length}`;
}

function showStandard() {
  if (!data.standard) return;
  $("by").hidden = false;
  $("by").querySelector("h2").textContent = `By the standard ${data.standard.name}`;
  const rank = (status) => ["error", "SKIP", "pass"].indexOf(status);
  const table = new Table($("standard"), [["entry", "name"], ["status"], ["standard"], ["result", "number"], ["step", "number"], ["rank", "number"], ["reason", "text"]],
    (r) => [r.entry, verdict(r.status), r.standard, full(r.result), r.step, r.rank, r.reason], { most: 300 });
  table.show([...data.standard.results].sort((a, b) => rank(a.status) - rank(b.status)));
}

function toggle(name, button) {
  if (!hidden.delete(name)) hidden.add(name);
  button.setAttribute("aria-pressed", String(!hidden.has(name)));
  showResults();
}

document.body.classList.add("flow");
fillVerdictHead(data.sentence, data.code === 1 ? 3 : data.code, data.dumps, data.details);
for (const [name, count] of data.outcomes) {
  $("chips").append(el("button", { type: "button", class: "chip", "aria-pressed": "true", onclick: (e) => toggle(name, e.currentTarget) }, verdict(name), ` ${counted(count, "call")}`));
}
$("search").addEventListener("input", showResults);
onKeys();
showOperators();
showResults();
showStandard();
ready();
