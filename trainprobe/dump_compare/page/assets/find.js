// Looking for a name, for the next difference, and for the same collective on another rank.
const search = $("search"), hits = $("hits");
let found = [];

function say(text) { $("said").textContent = text; }

function seek() {
  sought = search.value.trim().toLowerCase();
  found = [];
  if (sought) {
    const holds = tree.texts.map((text) => text.toLowerCase().includes(sought));
    for (let i = 0; i < tree.size; i++) {
      if (tree.isLeft(i) && (holds[tree.label[i]] || holds[tree.aside[i]] || (tree.a[i] >= 0 && holds[tree.a[i]]) || (tree.b[i] >= 0 && holds[tree.b[i]]))) found.push(i);
    }
  }
  countHits();
  draw();
}

function countHits() {
  const at = found.indexOf(selected);
  hits.textContent = sought ? (found.length ? `${at < 0 ? "–" : at + 1} of ${found.length}` : "none") : "";
}

function nextHit(step) {
  if (!found.length) return;
  const at = found.findIndex((line) => (step > 0 ? line > selected : line >= selected));
  const place = step > 0 ? (at < 0 ? 0 : at) : (at < 0 ? found.length : at) - 1;
  select(found[(place + found.length) % found.length], true);
  countHits();
}

function nextOf(wanted, step, what) {
  const line = tree.next(selected < 0 ? (step > 0 ? -1 : 0) : selected, step, wanted);
  if (line < 0) { say(`no ${what} here`); return; }
  if (selected >= 0 && (line - selected) * step <= 0) say(step > 0 ? "went on from the top" : "went on from the end");
  else say("");
  select(line, true);
}

function nextDifference(step) { nextOf((line) => tree.isGrave(line), step, single ? "number that is not finite" : "difference"); }

async function toFirst() {
  if (!head.first) return;
  await showRank(head.first[0]);
  const line = tree.lineOf.get(head.first[1]);
  if (line === undefined) return;
  if (!tree.isLeft(line)) { $("pick-micro").value = ""; tree.chosen = null; }
  select(line, true);
}

async function follow(key, index) {
  const from = head.ranks[tree.index].rank;
  await showRank(index);
  const call = tree.callOfKey.get(key);
  if (call === undefined) { say(`rank ${head.ranks[index].rank} has no such collective`); return; }
  say(`from rank ${from} to rank ${head.ranks[index].rank}`);
  select(tree.lineOf.get(call), true);
}

function followNext() {
  const link = selected >= 0 ? tree.linkOf.get(tree.call[selected]) : undefined;
  if (!link) { say("the selected line is no collective"); return; }
  const own = head.ranks[tree.index];
  const mates = head.ranks.map((each, i) => ({ ...each, i })).filter((each) => each.step === own.step && (!link[2].length || link[2].includes(each.rank)));
  const at = mates.findIndex((each) => each.i === tree.index);
  if (mates.length < 2) { say("no other rank of this group is on the page"); return; }
  follow(link[1], mates[(at + 1) % mates.length].i);
}
