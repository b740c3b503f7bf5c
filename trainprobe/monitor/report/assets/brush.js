// The strip below the map: the whole run at once, and the window of steps that is shown.
const brush = { canvas: $("brush"), drag: null };

function brushX(t) {
  const [low, high] = heat.whole;
  return heat.plot.left + ((t - low) / (high - low)) * heat.plot.width;
}

function drawBrush() {
  const { canvas } = brush, { plot, layer, whole, shown } = heat;
  if (!plot || !layer) return;
  const height = 40, { context, ratio } = sized(canvas, canvas.clientWidth, height);
  const rows = heat.rows.length ? heat.rows : layer.names.map((_, i) => i);
  const image = context.createImageData(Math.round(plot.width * ratio), Math.round(height * ratio));
  paint(image, layer, rows, heat.table, heat.colours, ...whole);
  context.putImageData(image, Math.round(plot.left * ratio), 0);
  const [a, b] = shown.map(brushX), right = plot.left + plot.width;
  context.fillStyle = css("--card");
  context.globalAlpha = 0.66;
  context.fillRect(plot.left, 0, a - plot.left, height);
  context.fillRect(b, 0, right - b, height);
  context.globalAlpha = 1;
  context.strokeStyle = css("--ink");
  context.lineWidth = 1.5;
  context.strokeRect(a + 0.75, 0.75, Math.max(2, b - a - 1.5), height - 1.5);
  context.fillStyle = css("--ink");
  for (const x of [a, b]) context.fillRect(Math.max(plot.left, Math.min(right - 4, x - 2)), height / 2 - 8, 4, 16);
  context.fillStyle = css("--muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText("whole run", plot.left - 7, height / 2);
  const share = Math.round((100 * (shown[0] - whole[0])) / (whole[1] - whole[0]));
  canvas.setAttribute("aria-valuenow", share);
  canvas.setAttribute("aria-valuetext", `steps ${show(Math.ceil(shown[0]))} to ${show(Math.floor(shown[1] - 1))}`);
}

function brushStep(event) {
  const box = brush.canvas.getBoundingClientRect(), [low, high] = heat.whole;
  const u = (event.clientX - box.left - heat.plot.left) / heat.plot.width;
  return low + Math.max(0, Math.min(1, u)) * (high - low);
}

function listenBrush() {
  const { canvas } = brush;
  canvas.addEventListener("pointerdown", (event) => {
    if (!heat.layer || event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    const t = brushStep(event), [a, b] = heat.shown, [low, high] = heat.whole, near = ((high - low) / heat.plot.width) * 8;
    const zoomed = b - a < (high - low) * 0.999;
    if (Math.abs(t - a) < near) brush.drag = { fixed: b };
    else if (Math.abs(t - b) < near) brush.drag = { fixed: a };
    else if (zoomed && t > a && t < b) brush.drag = { grip: t, a, b };
    else brush.drag = { fixed: t };
  });
  canvas.addEventListener("pointermove", (event) => {
    const { drag } = brush;
    if (!drag) return;
    const t = brushStep(event);
    if ("fixed" in drag) zoomTo(drag.fixed, t);
    else slide(drag.a + t - drag.grip, drag.b - drag.a);
  });
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { brush.drag = null; });
  canvas.addEventListener("dblclick", () => zoomTo(...heat.whole));
  canvas.addEventListener("keydown", (event) => {
    const [a, b] = heat.shown, span = b - a;
    const to = { ArrowLeft: a - span / 8, ArrowRight: a + span / 8, PageUp: a - span, PageDown: a + span, Home: heat.whole[0], End: heat.whole[1] - span }[event.key];
    if (to !== undefined) slide(to, span);
    else if (event.key === "0" || event.key === "Escape") zoomTo(...heat.whole);
    else return;
    event.preventDefault();
  });
}

function slide(from, span) {
  const [low, high] = heat.whole, a = Math.max(low, Math.min(high - span, from));
  zoomTo(a, a + span);
}
