// Numbers as text. `show` is for reading, with thin spaces between thousands; `short` for distances, of two digits; `full` for
// numbers that are to be compared or copied.
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

function short(x) {
  if (x === null || x === undefined) return "";
  if (typeof x === "string") return x.replace("inf", "∞");
  if (x === 0) return "0";
  if (Math.abs(x) >= 0.01 && Math.abs(x) < 1000) return String(Number(x.toPrecision(2))).replace("-", "−");
  return x.toExponential(1).replace("e+", "e").replace("-", "−").replace("e-", "e−");
}

function full(x, digits = 9) {
  if (x === null || x === undefined) return "";
  if (typeof x === "string") return x;
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return String(x);
  return Math.abs(x) >= 1e-4 && Math.abs(x) < 1e7 ? String(Number(x.toPrecision(digits))) : String(Number(x.toPrecision(Math.min(digits, 7))));
}

// A number by which rows are sorted: NaN and infinities, which JSON holds as text, come last.
function sortKey(x) {
  if (x === null || x === undefined) return -Infinity;
  if (typeof x === "number") return x;
  return { "inf": Infinity, "+inf": Infinity, "-inf": -Infinity, "nan": Infinity, "NaN": Infinity, "nan/inf": Infinity }[x] ?? x;
}

function counted(n, noun) {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}
