// What the page holds: the description at once, the trees of ranks and the numbers of their calls when they are first needed.
const head = data;
const single = head.paths.length === 1;
const PART = head.verdicts.indexOf("part");
const GRAVE = ["suspicious", "missing", "bug", "nonfinite"].map((name) => head.verdicts.indexOf(name));

async function loadCall(rank, call) {
  const chunk = await json(`c${rank}-${Math.floor(call / head.chunk)}`);
  return { ...chunk.calls[call % head.chunk], texts: chunk.texts };
}

// A distance in few letters; whole numbers and numbers of a statistic in full.
function short(x) {
  if (x === null || x === undefined) return "";
  if (typeof x === "string") return x.replace("inf", "∞");
  if (x === 0) return "0";
  if (Math.abs(x) >= 0.01 && Math.abs(x) < 1000) return String(Number(x.toPrecision(2))).replace("-", "−");
  return x.toExponential(1).replace("e+", "e").replace("-", "−").replace("e-", "e−");
}

function full(x, digits = 9) {
  if (typeof x === "string") return x;
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return String(x);
  return Math.abs(x) >= 1e-4 && Math.abs(x) < 1e7 ? String(Number(x.toPrecision(digits))) : String(Number(x.toPrecision(Math.min(digits, 7))));
}
