// Names and numbers beside a drawing.
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
