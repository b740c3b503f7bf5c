// Numbers, names and small pieces of the document.
function show(x, digits = 4) {
  if (x === null || x === undefined) return "not recorded";
  if (typeof x === "string") return x;
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "+inf" : "−inf";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e7) return x.toLocaleString("en-US").replaceAll(",", "\u2009").replace("-", "−");
  const text = size < 1e-3 || size >= 1e5 ? x.toExponential(digits - 2).replace(/\.?0+e/, "e") : String(+x.toPrecision(digits));
  return text.replaceAll("-", "−").replace("e+", "e");
}

// The end of a name tells most: cut from the left until it fits.
function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 1, high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText("…" + text.slice(middle)).width <= width) high = middle;
    else low = middle + 1;
  }
  return "…" + text.slice(low);
}

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

// Round numbers that part a range into about `count` pieces.
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  let stride = power * ([1, 2, 5].find((m) => m * power >= raw) ?? 10);
  if (whole) stride = Math.max(1, Math.round(stride));
  const found = [];
  for (let v = Math.ceil(low / stride) * stride; v <= high + stride * 1e-9; v += stride) found.push(Math.abs(v) < stride * 1e-9 ? 0 : v);
  return found;
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
