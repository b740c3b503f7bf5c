// The page of config-check: the verdict of each check, and what differs.
const withVerdict = (row, at) => row.map((cell, i) => (i === at ? verdict(cell) : cell));

const cards = document.querySelectorAll(".differs");
const shown = data.map(({ columns, rows }, k) => ({
  card: cards[k], rows,
  table: new Table(cards[k].querySelector("table"), columns.map((name, i) => [name, "", (row) => row[i]]), (row) => withVerdict(row, columns.length - 1)),
}));

function showTables() {
  const sought = $("search").value.trim().toLowerCase();
  for (const { card, rows, table } of shown) {
    const found = rows.filter((row) => row.join(" ").toLowerCase().includes(sought));
    card.hidden = !found.length;
    table.show(found);
  }
}

$("tools").hidden = !shown.length;
onKeys();
showTables();
searches(showTables);
ready();
