// Shared by all pages: the data of the page, the theme, and elements.
const data = JSON.parse(document.getElementById("data").textContent);
const unpacked = new Map();
const theme = matchMedia("(prefers-color-scheme: dark)");
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

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Everything that depends on colours is drawn again when the system changes between light and dark.
function onTheme(draw) {
  theme.addEventListener("change", draw);
}

// Tells whoever opened the page that all of it is there.
function ready() {
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}
