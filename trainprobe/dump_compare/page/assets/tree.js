// The tree of one rank and step, and which of its lines are to be seen.
class Tree {
  constructor(index, data) {
    this.index = index;
    Object.assign(this, data);
    const n = this.depth.length;
    this.size = n;
    this.parent = new Int32Array(n).fill(-1);
    this.end = new Int32Array(n).fill(n); // behind the last line below a line
    this.grave = new Int32Array(n); // differences at a line and below it
    this.worst = Uint8Array.from(this.verdict);
    this.open = new Uint8Array(n);
    const path = [];
    for (let i = 0; i < n; i++) {
      while (path.length && this.depth[path.at(-1)] >= this.depth[i]) this.end[path.pop()] = i;
      this.parent[i] = path.length ? path.at(-1) : -1;
      path.push(i);
    }
    this.below = new Uint8Array(n); // gravest verdict of the lines below a line
    for (let i = n - 1; i >= 0; i--) {
      if (this.verdict[i] === PART) this.worst[i] = this.below[i];
      if (GRAVE.includes(this.verdict[i])) this.grave[i]++;
      const up = this.parent[i];
      if (up < 0) continue;
      this.grave[up] += this.grave[i];
      this.below[up] = Math.max(this.below[up], this.below[i], this.worst[i]);
    }
    this.lineOf = new Map();
    this.call.forEach((call, line) => { if (call >= 0) this.lineOf.set(call, line); });
    this.linkOf = new Map(this.links.map((link) => [link[0], link]));
    this.callOfKey = new Map(this.links.map((link) => [link[1], link[0]]));
    this.chosen = null; // micro-batch
    this.depth.forEach((depth, i) => { if (depth === 0) this.open[i] = 1; });
    this.lines = [];
    this.place = new Map();
  }

  // The gravest verdict of the lines below a line.
  graveBelow(line) { return this.below[line]; }

  hasChildren(line) { return this.end[line] > line + 1; }

  isGrave(line) { return GRAVE.includes(this.verdict[line]); }

  // Whether a line belongs to the chosen micro-batch, or to none.
  isLeft(line) {
    if (this.chosen === null) return true;
    if (this.call[line] >= 0) return this.micro[line] < 0 || this.micro[line] === this.chosen;
    for (let i = line + 1; i < this.end[line]; i++) if (this.isLeft(i)) return true;
    return false;
  }

  refresh() {
    const lines = [];
    for (let i = 0; i < this.size;) {
      if (!this.isLeft(i)) { i = this.end[i]; continue; }
      lines.push(i);
      i = this.open[i] ? i + 1 : this.end[i];
    }
    this.lines = lines;
    this.place = new Map(lines.map((line, at) => [line, at]));
  }

  reveal(line) {
    for (let up = this.parent[line]; up >= 0; up = this.parent[up]) this.open[up] = 1;
  }

  setAll(line, open) {
    for (let i = line; i < this.end[line]; i++) this.open[i] = open && this.hasChildren(i) ? 1 : 0;
  }

  foldBut(line) {
    this.depth.forEach((depth, i) => { this.open[i] = depth === 0 ? 1 : 0; });
    if (line >= 0) this.reveal(line);
  }

  // Opens the only call of a part of the step, which is the model itself.
  openRoot() {
    for (let i = 0; i < this.size; i = this.end[i]) {
      let large = -1;
      for (let k = i + 1; k < this.end[i]; k = this.end[k]) if (this.end[k] - k > (this.end[i] - i) / 2) large = k;
      if (large >= 0) this.open[large] = 1;
    }
  }

  // The next line for which `wanted` holds, before or after another one, round the end; -1 where there is none.
  next(from, step, wanted) {
    for (let k = 1, i = from; k <= this.size; k++) {
      i = (i + step + this.size) % this.size;
      if (this.isLeft(i) && wanted(i)) return i;
    }
    return -1;
  }

  name(line) {
    const at = this.a[line] >= 0 ? this.a[line] : this.b[line];
    return at >= 0 ? this.texts[at] : this.texts[this.label[line]];
  }
}
