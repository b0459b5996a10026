// Drag to move, Shift+drag to zoom to a range, click to select, hover to read.

function listenToPointer(page, canvas) {
  let from = null;
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = placeOf(event);
    from = { x, y, lastX: x, lastY: y, range: event.shiftKey, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = placeOf(event);
    if (!from) return page.hover(x, y);
    from.moved ||= Math.hypot(x - from.x, y - from.y) > 3;
    if (!from.moved) return undefined;
    element("tip").hidden = true;
    if (from.range) return showRange(page, from.x, x);
    canvas.classList.add("dragging");
    if (x !== from.lastX) page.pan(from.lastX - x);
    if (Math.abs(y - from.y) > 12) page.scroll(from.lastY - y);
    [from.lastX, from.lastY] = [x, y];
    return undefined;
  });
  const release = (event) => {
    if (!from) return;
    const [x, y] = placeOf(event), { range, moved } = from, begin = from.x;
    from = null;
    canvas.classList.remove("dragging");
    if (!moved) page.select(attemptAt(page.painter, page, x, y));
    else if (range) zoomTo(page, begin, x);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", () => { from = null; canvas.classList.remove("dragging"); page.draw(); });
  canvas.addEventListener("pointerleave", () => { element("tip").hidden = true; });
}

function showRange(page, from, to) {
  page.placeRing();
  const context = element("overlay").getContext("2d");
  context.save();
  context.globalAlpha = 0.18;
  context.fillStyle = page.painter.colours.accent;
  context.fillRect(Math.min(from, to), AXIS, Math.abs(to - from), page.painter.height - AXIS);
  context.restore();
}

function zoomTo(page, from, to) {
  const { view, painter } = page, perPixel = (view.u1 - view.u0) / painter.plotWidth;
  const [left, right] = [Math.min(from, to), Math.max(from, to)].map((x) => view.u0 + (clamp(x, GUTTER, painter.width) - GUTTER) * perPixel);
  if (right - left < 4 * perPixel) return page.draw();
  Object.assign(view, { u0: left, u1: right });
  return page.keepInView();
}
