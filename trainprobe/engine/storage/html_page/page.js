// Shared by all pages: the data of the page, its place in the address, the theme, keys, and elements.
const data = JSON.parse(document.getElementById("data").textContent);
const unpacked = new Map();
const theme = matchMedia("(prefers-color-scheme: dark)");
const narrow = () => innerWidth <= 640; // a phone
const $ = (id) => document.getElementById(id);

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const content = new Uint8Array(await new Response(stream).arrayBuffer());
  document.documentElement.dataset.unpacked = Number(document.documentElement.dataset.unpacked ?? 0) + content.length;
  return content;
}

// A blob is unpacked when it is first asked for, and then kept.
function bytes(id) {
  if (!unpacked.has(id)) unpacked.set(id, inflate($(id).textContent));
  return unpacked.get(id);
}

function json(id) {
  const key = `json ${id}`;
  if (!unpacked.has(key)) unpacked.set(key, inflate($(id).textContent).then((content) => JSON.parse(new TextDecoder().decode(content))));
  return unpacked.get(key);
}

// An element with attributes, listeners ("onclick") and children; text is never read as HTML.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

// An element of a class, with children.
function make(tag, className, ...children) {
  return el(tag, className ? { class: className } : {}, ...children);
}

// What was found, as a word beside a dot of its colour.
function verdict(name, ...more) {
  return make("span", `verdict ${verdictClass(name)}`, name, ...more);
}

function verdictClass(name) {
  return `v-${String(name).replaceAll(" ", "-")}`;
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Everything that depends on colours is drawn again when the system changes between light and dark.
function onTheme(draw) {
  theme.addEventListener("change", draw);
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
}

// What is looked at stands in the address after "#", as name=value; opening it again shows it again. "#finding-3" is an element.
let placing, kept = {};

function place() {
  return location.hash.includes("=") ? Object.fromEntries(new URLSearchParams(location.hash.slice(1))) : {};
}

function keepHash(hash) {
  clearTimeout(placing);
  kept = {};
  history.replaceState(null, "", hash || location.pathname);
}

function keepPlace(changes) {
  kept = { ...place(), ...kept, ...changes };
  clearTimeout(placing);
  placing = setTimeout(() => {
    const said = Object.entries(kept).filter(([, value]) => value !== "" && value !== null);
    if (said.length || location.hash.includes("=")) keepHash(said.length ? `#${new URLSearchParams(said)}` : "");
  }, 100);
}

// What is searched for is kept in the address too.
function searches(act) {
  const search = $("search");
  const restore = () => { if ((place().q ?? "") !== search.value) { search.value = place().q ?? ""; act(); } };
  search.addEventListener("input", act);
  search.addEventListener("input", () => keepPlace({ q: search.value }));
  addEventListener("hashchange", restore);
  restore();
}

// Calls a function by the key that is pressed, unless the user types; "/" goes to the search field of every page.
function onKeys(actions = {}) {
  document.addEventListener("keydown", (event) => {
    const active = document.activeElement;
    if (["INPUT", "SELECT"].includes(active?.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (active?.tagName === "BUTTON" && [" ", "Enter"].includes(event.key)) return;
    const search = document.querySelector("input[type=search]");
    const act = actions[event.key] ?? (event.key === "/" && search ? () => search.focus() : null);
    if (act) { event.preventDefault(); act(); }
  });
}

function placeTip(event, ...lines) {
  const tip = $("tip");
  tip.hidden = lines.length === 0;
  if (tip.hidden) return;
  tip.replaceChildren(...lines);
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - height - 4, event.clientY + 14))}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

// A canvas of this size in CSS pixels, empty and as sharp as the screen.
function sized(canvas, width, height) {
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  const w = Math.max(1, Math.round(width * ratio)), h = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${css("--sans")}`;
  return { context, ratio };
}

// Tells whoever opened the page that all of it is there.
function ready() {
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}
