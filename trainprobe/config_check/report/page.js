// The page of config-check: the verdict of each check, and what differs.
const withVerdict = (row, at) => row.map((cell, i) => (i === at ? verdict(cell) : cell));

document.body.classList.add("flow");
fillVerdictHead(data.sentence, data.code, data.paths, data.notes);
if (data.consequences) $("sentence").after(el("p", { id: "consequences" }, data.consequences));
new Table($("summary"), [["check"], ["verdict"], ["what differs", "text"]], (row) => withVerdict(row, 1)).show(data.summary);

const shown = data.tables.map(({ title, columns, rows, more }) => {
  const element = make("table"), card = make("section", "card", make("h2", "", title), make("div", "scroll", element), more ? make("p", "hint", more) : null);
  document.querySelector("main").append(card);
  return { card, rows, table: new Table(element, columns.map((name, i) => [name, "", (row) => row[i]]), (row) => withVerdict(row, columns.length - 1)) };
});

function showTables() {
  const sought = $("search").value.trim().toLowerCase();
  for (const { card, rows, table } of shown) {
    const found = rows.filter((row) => row.join(" ").toLowerCase().includes(sought));
    card.hidden = !found.length;
    table.show(found);
  }
}

$("tools").hidden = !shown.length;
$("search").addEventListener("input", showTables);
onKeys();
showTables();
ready();
