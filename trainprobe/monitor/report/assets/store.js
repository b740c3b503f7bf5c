// What the page holds: the description of the run, and its arrays, which are unpacked when they are first looked at.
const run = data;
const ZERO = 2, LOWEST = 3, HIGHEST = 253, INFINITE = 254, NOT_A_NUMBER = 255;
const CODE_KNOTS = [LOWEST, 15, 241, HIGHEST];

async function stepNumbers(steps) {
  if ("blob" in steps) return new Float64Array((await bytes(steps.blob)).buffer);
  return Float64Array.from({ length: steps.count }, (_, i) => steps.start + i * steps.stride);
}

async function loadCurve(scalar) {
  const values = new Float32Array((await bytes(scalar.values)).buffer);
  return { label: scalar.name, steps: await stepNumbers(scalar.steps), values };
}

// One plane of a metric: codes [rows, columns], and the steps at which its columns begin and end.
async function loadLayer(metric, view) {
  const steps = await stepNumbers(metric.steps);
  const spread = view === "spread";
  const source = spread ? metric.spread : metric.views[view];
  const low = !spread && source.label === "smallest rank";
  const codes = await bytes(source.planes[low ? 1 : 0]);
  const columns = Math.ceil(steps.length / source.every);
  const gap = typicalGap(steps) * 1.5;
  const begins = new Float64Array(columns), ends = new Float64Array(columns);
  for (let c = 0; c < columns; c++) {
    begins[c] = steps[c * source.every];
    const last = Math.min(steps.length, (c + 1) * source.every);
    ends[c] = Math.min(last < steps.length ? steps[last] : Infinity, steps[last - 1] + gap);
  }
  return {
    metric, codes, columns, begins, ends, low, every: source.every, names: metric.rows,
    knots: spread ? metric.spread.knots : metric.knots,
    domain: spread ? metric.spread.domain : metric.domain,
    scale: spread ? "ratio" : metric.scale, pivot: metric.pivot,
  };
}

function typicalGap(steps) {
  if (steps.length < 2) return 1;
  const gaps = Array.from({ length: Math.min(999, steps.length - 1) }, (_, i) => steps[i + 1] - steps[i]);
  return gaps.sort((a, b) => a - b)[gaps.length >> 1];
}

// t is log10 of a number, or asinh for signed data; see planes.py for the code.
function tOf(layer, row, code) {
  const k = layer.knots[row];
  const i = code < CODE_KNOTS[1] ? 0 : code < CODE_KNOTS[2] ? 1 : 2;
  return k[i] + ((code - CODE_KNOTS[i]) / (CODE_KNOTS[i + 1] - CODE_KNOTS[i])) * (k[i + 1] - k[i]);
}

function numberOf(layer, t) {
  return layer.scale === "symlog" ? layer.pivot * Math.sinh(t * Math.LN10) : 10 ** t;
}

function valueOf(layer, row, code) {
  if (code === 0) return null;
  if (code === 1) return -Infinity;
  if (code === ZERO) return 0;
  if (code === INFINITE) return Infinity;
  if (code === NOT_A_NUMBER) return NaN;
  return numberOf(layer, tOf(layer, row, code));
}
