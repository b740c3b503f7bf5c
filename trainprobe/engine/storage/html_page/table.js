// The tables of all pages: a heading that may sort, rows that are made when they are shown, and a button for the next ones.
class Table {
  // columns: [heading, class of its cells, what a row is sorted by]. cells: returns the texts or elements of a row. most: rows
  // that are shown at once. under: returns what stands on a line of its own below a row. pick: called with a row that is clicked.
  constructor(table, columns, cells, { most = narrow() ? 10 : 50, under = null, pick = null } = {}) {
    Object.assign(this, { table, columns, cells, most, under, pick, order: null, down: true });
    this.heads = columns.map(([name, kind, key]) => {
      const head = el("th", { scope: "col", class: [kind, key ? "sorts" : ""].filter(Boolean).join(" ") || null, title: key ? "sort" : null }, name);
      if (key) head.addEventListener("click", () => this.sortBy(key, head));
      return head;
    });
    this.body = make("tbody");
    this.button = el("button", { type: "button", class: "more", hidden: true, onclick: () => this.add() });
    table.replaceChildren(make("thead", "", make("tr", "", ...this.heads)), this.body);
    (table.closest(".scroll") ?? table).after(this.button);
  }

  sortBy(key, head) {
    this.down = this.order === key ? !this.down : true;
    this.order = key;
    for (const each of this.heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
    this.show(this.rows);
  }

  show(rows) {
    const sign = this.down ? -1 : 1, key = this.order && ((row) => sortKey(this.order(row)));
    this.rows = rows;
    this.sorted = key ? [...rows].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * sign) : rows;
    this.shown = 0;
    this.body.replaceChildren();
    this.add();
  }

  add() {
    for (const row of this.sorted.slice(this.shown, this.shown + this.most)) this.body.append(...this.lines(row));
    this.shown = Math.min(this.sorted.length, this.shown + this.most);
    const left = this.sorted.length - this.shown;
    this.button.hidden = left === 0;
    this.button.textContent = `show ${Math.min(left, this.most)} more of ${left}`;
  }

  lines(row) {
    const line = el("tr", this.pick ? { class: "picks", onclick: () => this.pick(row) } : {});
    this.cells(row).forEach((cell, i) => line.append(el("td", { class: this.columns[i][1] || null, "data-label": this.columns[i][0] }, ...(Array.isArray(cell) ? cell : [cell]))));
    const below = this.under?.(row);
    if (!below) return [line];
    line.classList.add("above");
    return [line, make("tr", "", el("td", { class: "under", colspan: this.columns.length }, below))];
  }
}
