// The page of op-check: operators, and their results, the gravest first.
const ORDER = data.outcomes.map(([name]) => name);
const hidden = new Set((place().hide ?? "").split(",").filter(Boolean));

const operators = new Table($("operators"), [["operator", "name"], ["direction"], ["judged against"], ["worst, in bounds", "number"], ["results"]],
  ({ first, counts, references }) => [first.operator, first.direction, [...references].join(", "), full(first.bounds, 3),
    ORDER.filter((name) => counts.has(name)).map((name) => make("span", "counts", verdict(name), ` ${counts.get(name)}`))],
  { pick: ({ first }) => { $("search").value = first.operator; keepPlace({ q: first.operator }); showResults(); } });

const results = new Table($("results"),
  [["entry", "name"], ["verdict"], ["bounds", "number", (r) => r.bounds], ["recorded", "number"], ["belongs", "number"], ["share", "number", (r) => r.share], ["result", "number"], ["step", "number", (r) => r.step], ["rank", "number", (r) => r.rank], ["reason", "text"]],
  (r) => [
    [r.entry, make("small", "", [r.module, r.equal_calls ? `and ${r.equal_calls} equal calls` : ""].filter(Boolean).join(" · "))],
    verdict(r.verdict), full(r.bounds, 3), [full(r.got), make("small", "", r.at && r.at.length ? `at [${r.at.join(", ")}]` : "")], full(r.want),
    r.share ? `${full(100 * r.share, 3)} %` : "", full(r.result), r.step, r.rank, [r.reason, r.note].filter(Boolean).join("; "),
  ]);

function showOperators() {
  const groups = new Map();
  for (const result of data.results) {
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
  const found = data.results.filter((r) => !hidden.has(r.verdict) && `${r.entry} ${r.module} ${r.operator ?? ""}`.toLowerCase().includes(sought));
  results.show(found);
  $("shown").textContent = `${found.length} of ${data.results.length}`;
}

function showStandard() {
  if (!data.standard) return;
  $("by").hidden = false;
  $("by").querySelector("h2").textContent = `By the standard ${data.standard.name}`;
  const rank = (status) => ["error", "SKIP", "pass"].indexOf(status);
  const table = new Table($("standard"), [["entry", "name"], ["status"], ["standard"], ["result", "number"], ["step", "number"], ["rank", "number"], ["reason", "text"]],
    (r) => [r.entry, verdict(r.status), r.standard, full(r.result), r.step, r.rank, r.reason]);
  table.show([...data.standard.results].sort((a, b) => rank(a.status) - rank(b.status)));
}

function toggle(name, button) {
  if (!hidden.delete(name)) hidden.add(name);
  button.setAttribute("aria-pressed", String(!hidden.has(name)));
  keepPlace({ hide: [...hidden].join() });
  showResults();
}

for (const [name, count] of data.outcomes) {
  $("chips").append(el("button", { type: "button", class: "chip", "aria-pressed": String(!hidden.has(name)), onclick: (e) => toggle(name, e.currentTarget) }, verdict(name), ` ${counted(count, "call")}`));
}
onKeys();
showOperators();
showResults();
showStandard();
searches(showResults);
ready();
