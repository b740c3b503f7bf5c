// The panel of the selected line: what became of the call, its numbers on both sides, its arguments, call stacks, histograms.
const panel = $("panel");
const WORDS = {
  identical: "Identical", rounding: "Within rounding", carried: "Carried", unknown: "Not comparable", suspicious: "Suspicious",
  missing: "Missing", bug: "Parts here", recorded: "Recorded", nonfinite: "Not finite", part: "",
};
const MEANS = {
  identical: "All that both dumps hold of it agrees.", rounding: "What it gives differs by no more than its own rounding explains.",
  carried: "What it gives differs, and what it is given explains that.", unknown: "The dumps hold nothing that can be compared.",
  suspicious: "What it gives differs more than what it is given explains.", missing: "One side lacks it, or a result of it.",
  bug: "What it gives differs, and neither what it is given nor rounding explains that.",
  nonfinite: "It holds NaN or infinities.",
};
const SIDES = single ? ["a"] : ["a", "b"];
const NAMES = { a: single ? "" : "A", b: "B" };

async function showPanel(line) {
  if (line < 0 || tree.call[line] < 0) { showPart(line); return; }
  const rank = tree.index, call = tree.call[line];
  const about = await loadCall(rank, call);
  if (selected !== line || tree.index !== rank) return; // another line was chosen meanwhile
  const name = head.verdicts[tree.verdict[line]];
  const box = make("div", `about ${verdictClass(name)}`);
  box.append(make("p", "badge", make("i", "dot"), WORDS[name] ?? name), ...entries(line));
  if (MEANS[name]) box.append(make("p", "means", MEANS[name]));
  if (about.argument) box.append(make("p", "argument", about.argument));
  if (!single) box.append(facts(about));
  const link = linkBox(line);
  panel.replaceChildren(...[box, link, ...about.values.map((value) => valueBox(value, about.texts))].filter(Boolean));
  if (about.more) panel.append(make("p", "quiet", `${about.more} more values of this call are not on the page (--json has all).`));
  if (about.arguments) panel.append(argumentBox(about));
  panel.append(...stackBoxes(about));
  panel.scrollTop = 0;
}

function showPart(line) {
  const box = make("div", "about");
  if (line < 0) box.append(make("p", "means", "Select a line to see its numbers."));
  else box.append(make("h2", "", tree.name(line)), make("p", "means", `${tree.end[line] - line - 1} calls, ${tree.grave[line]} of them ${single ? "not finite" : "differ"}.`));
  panel.replaceChildren(box);
}

function entries(line) {
  const names = SIDES.map((side) => (tree[side][line] < 0 ? null : tree.texts[tree[side][line]]));
  if (single || names[0] === names[1]) return [make("h2", "", names[0])];
  return SIDES.map((side, i) => make("h2", "two", make("b", "", NAMES[side]), names[i] ?? make("i", "quiet", "has no such call")));
}

function facts(about) {
  const list = make("dl", "facts");
  for (const [name, number] of [["given apart", about.given], ["own rounding, by the model", about.own]]) {
    list.append(make("div", "", make("dt", "", name), make("dd", "", number === "inf" ? "explains all" : short(number) || "–")));
  }
  return list;
}

function valueBox(value, texts) {
  const far = value.far, box = make("section", "value");
  const apart = far && far[0] !== 0;
  const types = SIDES.map((side) => (value[side] ? texts[value[side].type] : null));
  const same = types.every((type) => type === types[0]);
  const name = make("h3", "", texts[value.slot], make("span", "type", same ? types[0] : types.filter(Boolean).join("  |  ")));
  if (far) name.append(make("span", `apart ${value.result ? "result" : "given"} ${apart ? "" : "none"}`, farText(far, texts)));
  box.append(name);
  if (value.note !== undefined) box.append(make("p", "note", texts[value.note]));
  const table = numberTable(value, texts);
  if (table) box.append(table);
  for (const side of SIDES) if (value[side]?.note !== undefined) box.append(make("p", "note", `${NAMES[side]} ${texts[value[side].note]}`));
  const extra = [];
  if (value.floor) extra.push(`rounding measured by --floor: ${short(value.floor)}`);
  if (value.truth) extra.push(`from the run in high precision: A ${short(value.truth[0])}, B ${short(value.truth[1])}`);
  if (extra.length) box.append(make("p", "note", extra.join(" · ")));
  if (value.histogram) box.append(histogramBox(value.histogram));
  return box;
}

function farText(far, texts) {
  const [low, , high, evidence] = far, by = texts[evidence];
  if (by === "absent" || by === "nothing") return by === "absent" ? "on one side" : "nothing to compare";
  if (low === 0 && high === 0) return "equal";
  if (low === 0) return "bits differ";
  return `${by === "values" ? "" : "≥ "}${short(low)} apart`;
}

function numberTable(value, texts) {
  const numbers = Object.fromEntries(SIDES.map((side) => [side, new Map((value[side]?.numbers ?? []).map(([name, x]) => [texts[name], x]))]));
  const bits = Object.fromEntries(SIDES.map((side) => [side, new Map((value[side]?.bits ?? []).map(([name, x]) => [texts[name], x]))]));
  const names = [...new Set(SIDES.flatMap((side) => [...numbers[side].keys()]))];
  const kinds = [...new Set(SIDES.flatMap((side) => [...bits[side].keys()]))];
  if (!names.length && !kinds.length) return null;
  const table = make("table", "");
  table.append(make("tr", "", make("th", ""), ...SIDES.map((side) => make("th", "", single ? "value" : NAMES[side])), ...(single ? [] : [make("th", "", "B − A")])));
  for (const name of names) {
    const cells = SIDES.map((side) => numbers[side].get(name));
    const row = make("tr", "", make("th", "", name), ...cells.map((x) => make("td", typeof x === "string" ? "odd" : "", x === undefined || x === null ? "" : full(x))));
    if (!single) {
      const both = cells.every((x) => typeof x === "number"), change = both ? cells[1] - cells[0] : null;
      row.append(make("td", change ? "change" : "quiet", both ? (change === 0 ? "=" : short(change)) : ""));
    }
    table.append(row);
  }
  for (const kind of kinds) {
    const cells = SIDES.map((side) => bits[side].get(kind) ?? "");
    const row = make("tr", "", make("th", "", kind), ...cells.map((x) => make("td", "bits", x)));
    if (!single) row.append(make("td", cells[0] === cells[1] ? "quiet" : "change", cells.includes("") ? "" : cells[0] === cells[1] ? "=" : "≠"));
    table.append(row);
  }
  return make("div", "scroll", table);
}

function histogramBox(histogram) {
  if (histogram === "left out") return make("p", "quiet", "No histogram: this rank stores more elements than are counted for the page.");
  let curves = [];
  if (histogram.recorded) {
    curves = histogram.recorded.map((each) => (each ? { edges: each[0], counts: each[1] } : null));
  } else {
    const [low, high, counts] = histogram;
    curves = counts.map((each) => (each.length ? { edges: each.map((_, i) => low + ((high - low) * i) / each.length).concat(high), counts: each } : null));
  }
  return drawHistogram(curves);
}

function drawHistogram(curves) {
  const width = 360, height = 64, svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "histogram");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "how the elements are spread");
  const there = curves.filter(Boolean);
  const low = Math.min(...there.map((c) => c.edges[0])), high = Math.max(...there.map((c) => c.edges.at(-1)));
  const most = Math.log1p(Math.max(1, ...there.flatMap((c) => c.counts)));
  curves.forEach((curve, side) => {
    if (!curve) return;
    const x = (edge) => ((edge - low) / (high - low || 1)) * width, y = (count) => height - 1 - (Math.log1p(count) / most) * (height - 6);
    let path = `M0 ${height}`;
    curve.counts.forEach((count, i) => { path += `L${x(curve.edges[i]).toFixed(1)} ${y(count).toFixed(1)}H${x(curve.edges[i + 1]).toFixed(1)}`; });
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", `${path}V${height}`);
    line.setAttribute("class", `side-${"ab"[side]}`);
    svg.append(line);
  });
  return make("figure", "", svg, make("figcaption", "", make("span", "", tick(low)), make("span", "quiet", "elements, logarithmic"), make("span", "", tick(high))));
}

function tick(x) { return String(Number(x.toPrecision(3))); }

function argumentBox(about) {
  const table = make("table", "");
  table.append(make("tr", "", make("th", ""), ...SIDES.map((side) => make("th", "", single ? "value" : NAMES[side]))));
  for (const [name, ...values] of about.arguments) {
    const texts = SIDES.map((_, i) => (values[i] < 0 ? "" : about.texts[values[i]]));
    const other = !single && texts[0] !== texts[1];
    table.append(make("tr", "", make("th", "", about.texts[name]), ...texts.map((text) => make("td", other ? "change" : "", text))));
  }
  return make("section", "value", make("h3", "", "arguments"), make("div", "scroll", table));
}

function stackBoxes(about) {
  const lines = about.stacks.map((stack) => stack.map((i) => about.texts[i]));
  const same = lines.length < 2 || lines[0].join("\n") === lines[1].join("\n");
  return lines.filter((stack, i) => stack.length && (i === 0 || !same)).map((stack) => {
    const which = single || same ? "" : ` of ${lines[0] === stack ? "A" : "B"}`;
    const box = make("details", "stack", make("summary", "", `call stack${which}`), make("pre", "", stack.join("\n")));
    box.open = true;
    return box;
  });
}

function linkBox(line) {
  const link = tree.linkOf.get(tree.call[line]);
  if (!link) return null;
  const own = head.ranks[tree.index], ranks = link[2].length ? link[2] : head.ranks.map((each) => each.rank);
  const others = head.ranks.map((each, i) => ({ ...each, i })).filter((each) => each.step === own.step && each.rank !== own.rank && ranks.includes(each.rank));
  const box = make("section", "value", make("h3", "", "collective", make("span", "type", link[2].length ? `ranks ${link[2].join(", ")}` : "group not recorded")));
  box.append(make("p", "links", ...others.map((each) => {
    const button = make("button", "", `⇄ rank ${each.rank}`);
    button.type = "button";
    button.onclick = () => follow(link[1], each.i);
    return button;
  })));
  if (!others.length) box.append(make("p", "quiet", "No other rank of this group is on the page."));
  return box;
}
