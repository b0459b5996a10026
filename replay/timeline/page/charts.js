// Throughput and staleness, under the lanes and in the same time.

const BIN = 5; // pixels

function drawCharts(painter, state) {
  drawThroughput(painter, state, painter.lanesBottom + 6);
  drawStaleness(painter, state, painter.lanesBottom + 6 + CHART);
}

// When tokens were sealed, and how many had been by then: of what still stands, and of what was redone later.
function sealedTokens({ attempts, first_seq: firstSeq }, end) {
  const places = [];
  for (let i = 0; i < attempts.length; i++) if (attempts.seal_seq[i] >= firstSeq && attempts.tokens[i] > 0) places.push(i);
  places.sort((one, other) => end[one] - end[other]);
  const times = new Float64Array(places.length), kept = new Float64Array(places.length + 1), redone = new Float64Array(places.length + 1);
  places.forEach((i, at) => {
    const lost = OUTCOMES[attempts.outcome[i]] === "redone";
    times[at] = end[i];
    kept[at + 1] = kept[at] + (lost ? 0 : attempts.tokens[i]);
    redone[at + 1] = redone[at] + (lost ? attempts.tokens[i] : 0);
  });
  return { times, kept, redone };
}

function throughput(painter, { view, bent: { sealed: { times, kept, redone } } }) {
  const bins = Math.max(1, Math.floor(painter.plotWidth / BIN)), width = (view.u1 - view.u0) / bins;
  const until = (u) => firstWhere(times.length, (at) => times[at] >= u);
  const rates = { bins, kept: new Float64Array(bins), redone: new Float64Array(bins) };
  let from = until(view.u0);
  for (let bin = 0; bin < bins; bin++) {
    const to = until(view.u0 + (bin + 1) * width);
    rates.kept[bin] = ((kept[to] - kept[from]) * 1e6) / width;
    rates.redone[bin] = ((redone[to] - redone[from]) * 1e6) / width;
    from = to;
  }
  return rates;
}

function drawThroughput(painter, state, top) {
  const { context, colours } = painter, bottom = top + CHART - 8;
  const { bins, kept, redone } = throughput(painter, state);
  let most = 0;
  for (let bin = 0; bin < bins; bin++) most = Math.max(most, kept[bin] + redone[bin]);
  const height = bottom - top - 8, unit = most ? height / most : 0;
  painter.clipPlot(() => {
    for (let bin = 0; bin < bins; bin++) {
      const x = GUTTER + bin * BIN, below = kept[bin] * unit, above = redone[bin] * unit;
      context.fillStyle = colours.useful;
      context.fillRect(x, bottom - below, BIN - 1, below);
      context.fillStyle = colours.redone;
      context.fillRect(x, bottom - below - above, BIN - 1, above);
    }
  });
  frame(painter, top, bottom, "tokens / s", most ? Math.round(most).toLocaleString("en") : "0");
}

function drawStaleness(painter, { view, scale }, top) {
  const { context, colours, timeline: { steps } } = painter, bottom = top + CHART - 8;
  let most = 1;
  for (let i = 0; i < steps.length; i++) most = Math.max(most, steps.max_staleness[i]);
  const y = (staleness) => bottom - (staleness / most) * (bottom - top - 8);
  painter.clipPlot(() => {
    context.strokeStyle = colours.staleness;
    context.lineWidth = 1.5;
    context.beginPath();
    let last = null;
    for (let i = 0; i < steps.length; i++) {
      const x = painter.xOf(view, scale.toU(steps.end[i])), mean = steps.mean_staleness[i] / 1000;
      if (last === null || steps.train_step[i] <= last) context.moveTo(x, y(mean)); else context.lineTo(x, y(mean));
      last = steps.train_step[i];
    }
    context.stroke();
    for (let i = 0; i < steps.length; i++) {
      const x = painter.xOf(view, scale.toU(steps.end[i]));
      if (x < GUTTER || x > painter.width) continue;
      context.globalAlpha = steps.undone[i] ? 0.35 : 1;
      context.fillStyle = colours.staleness;
      context.beginPath();
      context.arc(x, y(steps.mean_staleness[i] / 1000), 2, 0, 7);
      context.fill();
      context.fillRect(x - 2.5, y(steps.max_staleness[i]) - 0.5, 5, 1.5);
    }
    context.globalAlpha = 1;
  });
  frame(painter, top, bottom, "staleness", `${most}`);
}

function frame(painter, top, bottom, title, most) {
  const { context, colours } = painter;
  context.fillStyle = colours.panel;
  context.fillRect(0, top - 3, GUTTER, bottom - top + 8);
  context.fillStyle = colours.line;
  context.fillRect(GUTTER, bottom, painter.plotWidth, 1);
  context.textAlign = "right";
  painter.label(most, GUTTER - 8, top + 8, GUTTER, colours.quiet, 10);
  painter.label("0", GUTTER - 8, bottom - 3, GUTTER, colours.quiet, 10);
  context.textAlign = "left";
  painter.label(title, 12, (top + bottom) / 2 + 1, GUTTER - 60, colours.quiet);
}
