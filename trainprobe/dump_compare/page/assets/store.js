// What the page holds: the description at once, the trees of ranks and the numbers of their calls when they are first needed.
const head = data;
const single = head.paths.length === 1;
const PART = head.verdicts.indexOf("part");
const GRAVE = ["suspicious", "missing", "bug", "nonfinite"].map((name) => head.verdicts.indexOf(name));

async function loadCall(rank, call) {
  const chunk = await json(`c${rank}-${Math.floor(call / head.chunk)}`);
  return { ...chunk.calls[call % head.chunk], texts: chunk.texts };
}
