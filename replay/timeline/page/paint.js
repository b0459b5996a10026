// Drawing: attempts go pixel by pixel into a buffer, which is what keeps 100,000 of them fluid; all else is drawn over it.

const GUTTER = 132, AXIS = 26, LIVES = 20, STEPS = 22, CHECKPOINTS = 20, CHART = 62, RIGHT = 12;
const TOP = AXIS + LIVES + STEPS + CHECKPOINTS + 4;

// What is rare is drawn last: nothing that was redone hides behind what went well.
const DRAWN_FIRST_TO_LAST = [0, 1, 6, 7, 2, 5, 3, 4];
const OUTCOMES = ["trained", "waiting", "running", "superseded", "redone", "late", "dropped", "parked"];

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["page", "panel", "ink", "quiet", "line", "stripe", "accent", "kill", "gap", "step", "undone", "checkpoint", "rollout",
    "weights", "useful", "staleness", ...OUTCOMES];
  const colours = Object.fromEntries(names.map((name) => [name, colour(name)]));
  colours.words = OUTCOMES.map((name) => toWord(colours[name]));
  colours.faint = OUTCOMES.map((name) => toWord(mix(colours[name], colours.panel, 0.82)));
  colours.sealEdge = OUTCOMES.map((name) => toWord(mix(colours[name], colours.panel, 0.5)));
  colours.panelWord = toWord(colours.panel);
  colours.stripeWord = toWord(colours.stripe);
  return colours;
}

function channels(hex) {
  const whole = hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex;
  return [1, 3, 5].map((at) => parseInt(whole.slice(at, at + 2), 16));
}

function mix(one, other, share) {
  const [a, b] = [channels(one), channels(other)];
  return `#${a.map((value, i) => Math.round(value + (b[i] - value) * share).toString(16).padStart(2, "0")).join("")}`;
}

function toWord(hex) {
  const [red, green, blue] = channels(hex);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

class Painter {
  constructor(canvas, timeline) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.timeline = timeline;
    this.order = drawingOrder(timeline.attempts);
    this.colours = readColours();
  }

  resize() {
    this.ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.lanesBottom = this.height - 2 * CHART - 6;
    this.lanesHeight = Math.max(40, this.lanesBottom - TOP);
    this.plotWidth = Math.max(40, this.width - GUTTER - RIGHT);
    this.image = new ImageData(Math.round(this.plotWidth * this.ratio), Math.round(this.lanesHeight * this.ratio));
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  xOf(view, u) { return GUTTER + ((u - view.u0) / (view.u1 - view.u0)) * this.plotWidth; }
  yOf(view, top) { return TOP + (top - view.top) * view.rowHeight; }

  draw(state) {
    const { context } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = this.colours.panel;
    context.fillRect(0, 0, this.width, this.height);
    this.drawAttempts(state);
    context.putImageData(this.image, Math.round(GUTTER * this.ratio), Math.round(TOP * this.ratio));
    this.clipPlot(() => {
      this.drawGaps(state);
      this.drawLabels(state);
      this.drawLives(state);
      this.drawMarks(state);
      this.drawSteps(state);
      this.drawCheckpoints(state);
      this.drawAxis(state);
    });
    this.drawGutter(state);
    drawCharts(this, state);
  }

  clipPlot(draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(GUTTER, 0, this.plotWidth, this.height);
    this.context.clip();
    draw();
    this.context.restore();
  }

  drawAttempts({ view, layout, bent, shown, hidden, searching }) {
    const { pixels, ratio, colours } = this;
    const { width, height } = this.image;
    const { worker, outcome, seal_seq: sealed } = this.timeline.attempts;
    const row = view.rowHeight * ratio, scroll = view.top * row;
    pixels.fill(colours.panelWord);
    layout.lanes.forEach((lane, number) => {
      if (number % 2 || lane.rows * row < 8) return;
      const from = clamp(Math.round(lane.top * row - scroll), 0, height);
      const to = clamp(Math.round((lane.top + lane.rows) * row - scroll), 0, height);
      pixels.fill(colours.stripeWord, from * width, to * width);
    });
    const scale = width / (view.u1 - view.u0);
    const { tops } = layout, { begin, end } = bent, space = row >= 4 ? Math.max(1, Math.round(row * 0.12)) : 0;
    const inView = whatIsInView(this.order, bent, view);
    for (let place = 0; place < inView.length; place++) {
      const i = inView[place];
      if (hidden[outcome[i]]) continue;
      let left = (begin[i] - view.u0) * scale, right = (end[i] - view.u0) * scale;
      if (right < 0 || left > width) continue;
      let top = Math.round(tops[i] * row - scroll), bottom = Math.round((tops[i] + 1) * row - scroll) - space;
      if (bottom < 0 || top >= height) continue;
      left = Math.max(0, Math.round(left));
      const whole = Math.round(right);
      right = Math.min(width, Math.max(left + 1, whole));
      top = Math.max(0, top);
      bottom = Math.min(height, Math.max(top + 1, bottom));
      const faint = searching && !shown[i];
      const word = (faint ? colours.faint : colours.words)[outcome[i]];
      for (let y = top; y < bottom; y++) {
        const from = y * width + left, to = y * width + right;
        if (right - left > 24) pixels.fill(word, from, to);
        else for (let at = from; at < to; at++) pixels[at] = word;
      }
      // The seal: an edge where the attempt was accepted.
      if (!faint && row >= 2 && sealed[i] > 0 && whole - left > 5 && whole <= width) {
        const edge = colours.sealEdge[outcome[i]];
        for (let y = top; y < bottom; y++) pixels.fill(edge, y * width + whole - Math.ceil(ratio), y * width + whole);
      }
    }
  }

  drawLabels({ view, layout, bent, hidden }) {
    if (view.rowHeight < 12) return;
    const { context, timeline: { attempts } } = this;
    context.font = "10px ui-monospace, 'DejaVu Sans Mono', monospace";
    context.textBaseline = "middle";
    context.fillStyle = "#ffffff";
    for (const i of whatIsInView(this.order, bent, view)) {
      const y = this.yOf(view, layout.tops[i]);
      if (y < TOP - view.rowHeight || y > this.lanesBottom || hidden[attempts.outcome[i]]) continue;
      const left = Math.max(GUTTER, this.xOf(view, bent.begin[i])), right = this.xOf(view, bent.end[i]);
      if (right - left < 74 || left > GUTTER + this.plotWidth) continue;
      const tokens = attempts.tokens[i] >= 0 && right - left > 130 ? ` · ${attempts.tokens[i]} tokens` : "";
      const middle = y + view.rowHeight * 0.45;
      if (middle > TOP + 5 && middle < this.lanesBottom - 5) context.fillText(`${identity(attempts, i)}${tokens}`, left + 4, middle);
    }
  }

  drawGaps({ view, scale }) {
    const { context, colours } = this;
    for (const gap of scale.gaps) {
      const left = this.xOf(view, gap.begin), right = this.xOf(view, gap.end);
      if (right < GUTTER || left > this.width) continue;
      context.fillStyle = colours.gap;
      context.fillRect(left, AXIS, right - left, this.height - AXIS);
      context.strokeStyle = colours.line;
      context.lineWidth = 1;
      context.save();
      context.beginPath();
      context.rect(left, AXIS, right - left, this.height - AXIS);
      context.clip();
      context.beginPath();
      for (let y = AXIS - 40; y < this.height + right - left; y += 9) {
        context.moveTo(left, y);
        context.lineTo(right, y - (right - left));
      }
      context.stroke();
      context.restore();
      const words = `${lasting(gap.to - gap.from)} down`;
      context.fillStyle = colours.quiet;
      context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
      context.textBaseline = "middle";
      context.save();
      context.translate((left + right) / 2, (TOP + this.lanesBottom) / 2);
      if (right - left < 70) context.rotate(-Math.PI / 2);
      context.textAlign = "center";
      if (right - left > 14) context.fillText(words, 0, 0);
      context.restore();
    }
  }

  drawLives({ view, scale }) {
    const { context, colours } = this;
    context.textBaseline = "middle";
    for (const life of this.timeline.lives) {
      const left = this.xOf(view, scale.toU(life.begin)), right = this.xOf(view, scale.toU(life.end));
      context.fillStyle = mix(colours.accent, colours.panel, 0.84);
      context.fillRect(left, AXIS, Math.max(1, right - left), LIVES - 3);
      const origin = life.restored ? ` · restored from ${life.restored_checkpoint ?? "the start"}` : "";
      this.label(`life ${life.epoch}${origin}`, Math.max(left, GUTTER) + 6, AXIS + LIVES / 2 - 1, Math.min(right, this.width) - Math.max(left, GUTTER) - 10, colours.ink);
      if (life.how === "killed") {
        context.strokeStyle = context.fillStyle = colours.kill;
        context.lineWidth = 1.5;
        context.beginPath();
        context.moveTo(right, AXIS - 2);
        context.lineTo(right, this.height);
        context.stroke();
        context.font = "bold 11px system-ui, 'DejaVu Sans', sans-serif";
        context.textAlign = "right";
        context.fillText("✕ killed", right - 4, AXIS + LIVES / 2 - 1);
        context.textAlign = "left";
      }
    }
  }

  drawMarks({ view, scale }) {
    const { context, colours } = this;
    const colourOf = { group_dropped: colours.dropped, group_parked: colours.parked, run_restored: colours.accent };
    for (const mark of this.timeline.marks) {
      const x = this.xOf(view, scale.toU(mark.time));
      if (x < GUTTER || x > this.width) continue;
      context.fillStyle = colourOf[mark.kind] ?? colours.kill;
      context.fillRect(x - 1.5, AXIS + LIVES - 7, 3, 4);
    }
  }

  drawSteps({ view, scale }) {
    const { context, colours } = this, y = AXIS + LIVES, { steps, weights } = this.timeline;
    for (let i = 0; i < steps.length; i++) {
      const left = this.xOf(view, scale.toU(steps.begin[i])), right = this.xOf(view, scale.toU(steps.end[i]));
      if (right < GUTTER || left > this.width) continue;
      context.fillStyle = steps.undone[i] ? colours.undone : colours.step;
      context.fillRect(left, y, Math.max(1.5, right - left - 0.5), STEPS - 7);
      const number = `${steps.train_step[i]}`;
      context.font = "10px system-ui, 'DejaVu Sans', sans-serif";
      const room = right - left - context.measureText(number).width;
      if (room < 2) continue;
      context.fillStyle = steps.undone[i] ? colours.ink : colours.panel;
      context.fillText(number, left + Math.min(4, room / 2), y + (STEPS - 7) / 2 + 0.5);
    }
    context.fillStyle = colours.weights;
    let last = -9;
    for (let i = 0; i < weights.length; i++) {
      const x = this.xOf(view, scale.toU(weights.time[i]));
      if (x < GUTTER || x > this.width || x - last < 7) continue;
      last = x;
      context.beginPath();
      context.moveTo(x, y + STEPS - 9);
      context.lineTo(x + 3.5, y + STEPS - 3.5);
      context.lineTo(x - 3.5, y + STEPS - 3.5);
      context.fill();
    }
  }

  drawCheckpoints({ view, scale }) {
    const { context, colours } = this, y = AXIS + LIVES + STEPS;
    for (const checkpoint of this.timeline.checkpoints) {
      const left = this.xOf(view, scale.toU(checkpoint.begin)), right = this.xOf(view, scale.toU(checkpoint.end));
      checkpoint.room = null;
      if (right < GUTTER - 90 || left > this.width) continue;
      const colour = checkpoint.failed ? colours.kill : checkpoint.kind === "rollout" ? colours.rollout : colours.checkpoint;
      context.fillStyle = colour;
      context.fillRect(left, y + 2, Math.max(2.5, right - left), CHECKPOINTS - 7);
      checkpoint.room = [left, right];
    }
    context.font = "10px system-ui, 'DejaVu Sans', sans-serif";
    this.timeline.checkpoints.forEach((checkpoint, number, all) => {
      if (!checkpoint.room) return;
      const [, right] = checkpoint.room;
      const next = all[number + 1]?.room?.[0] ?? this.width;
      const words = `${checkpoint.failed ? "failed " : ""}${checkpoint.name} · ${lasting(checkpoint.end - checkpoint.begin)}`;
      const text = [words, checkpoint.name].find((one) => context.measureText(one).width < next - right - 8);
      if (text) this.label(text, right + 4, y + CHECKPOINTS / 2 - 1, next - right, colours.quiet, 10);
    });
  }

  drawAxis({ view, scale }) {
    const { context, colours } = this;
    const step = tickStep((view.u1 - view.u0) / this.plotWidth);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    const from = Math.max(0, scale.toTime(view.u0)), to = Math.min(this.timeline.span, scale.toTime(view.u1));
    let last = -1e9;
    for (let t = Math.ceil(from / step) * step; t <= to;) {
      const u = scale.toU(t), x = this.xOf(view, u);
      const gap = scale.gaps.find((one) => t > one.from && t < one.to);
      if (gap?.compressed) { t = Math.ceil(gap.to / step) * step; continue; }
      context.fillStyle = mix(colours.line, colours.panel, 0.35);
      context.fillRect(Math.round(x), AXIS - 5, 1, 5);
      if (x - last > 64) {
        context.fillStyle = colours.quiet;
        context.fillText(elapsed(t, step), Math.round(x) + 4, AXIS / 2);
        last = x;
      }
      t += step;
    }
  }

  drawGutter({ view, layout }) {
    const { context, colours } = this;
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, GUTTER, this.height);
    context.fillStyle = colours.line;
    context.fillRect(GUTTER - 1, AXIS, 1, this.height - AXIS);
    context.fillRect(0, AXIS - 1, this.width, 1);
    context.fillRect(0, TOP - 1, this.width, 1);
    context.fillRect(0, this.lanesBottom + 2, this.width, 1);
    context.textBaseline = "middle";
    const rows = [["elapsed", AXIS / 2], ["lives", AXIS + LIVES / 2 - 1], ["steps, weights", AXIS + LIVES + STEPS / 2 - 3],
      ["checkpoints", AXIS + LIVES + STEPS + CHECKPOINTS / 2 - 1]];
    for (const [words, y] of rows) this.label(words, 12, y, GUTTER - 20, colours.quiet);
    context.save();
    context.beginPath();
    context.rect(0, TOP, GUTTER, this.lanesBottom - TOP);
    context.clip();
    let last = TOP - 12;
    for (const lane of layout.lanes) {
      const from = this.yOf(view, lane.top), to = this.yOf(view, lane.top + lane.rows);
      if (to < TOP || from > this.lanesBottom) continue;
      const y = clamp((from + to) / 2, Math.max(from, TOP) + 7, Math.max(TOP + 7, Math.min(to, this.lanesBottom) - 7));
      if (y - last < 13) continue;
      last = y;
      this.label(lane.label, 12, y, GUTTER - 20, colours.ink);
    }
    context.restore();
  }

  // Draws words that fit, or as much of them as does; returns false when nothing was worth it.
  label(words, x, y, width, colour, size = 11) {
    const { context } = this;
    if (width < size) return false;
    context.font = `${size}px system-ui, 'DejaVu Sans', sans-serif`;
    context.textBaseline = "middle";
    let text = words;
    if (context.measureText(text).width > width) {
      if (words.length < 5 || width < 40) return false;
      let kept = Math.floor((words.length * width) / context.measureText(words).width) - 1;
      while (kept > 2 && context.measureText(`${words.slice(0, kept)}…`).width > width) kept--;
      if (kept < 3) return false;
      text = `${words.slice(0, kept)}…`;
    }
    context.fillStyle = colour;
    context.fillText(text, x, y);
    return true;
  }
}

// The attempts of each outcome in the order of their begins, those that are drawn first first.
function drawingOrder({ outcome, length }) {
  const classes = DRAWN_FIRST_TO_LAST.map(() => []);
  for (let i = 0; i < length; i++) classes[DRAWN_FIRST_TO_LAST.indexOf(outcome[i])].push(i);
  return classes.map((places) => Int32Array.from(places));
}

// Of each class, from the first that has not ended before what is shown to the last that begins in it.
function whatIsInView(order, { begin, lastEnd }, { u0, u1 }) {
  const slices = order.map((places, number) => places.subarray(
    firstWhere(places.length, (at) => lastEnd[number][at] >= u0),
    firstWhere(places.length, (at) => begin[places[at]] > u1),
  ));
  const inView = new Int32Array(slices.reduce((sum, slice) => sum + slice.length, 0));
  let at = 0;
  for (const slice of slices) {
    inView.set(slice, at);
    at += slice.length;
  }
  return inView;
}

// How late anything of a class ends that begins no later: rises, so that it can be searched.
function lastEnds(order, end) {
  return order.map((places) => {
    const last = new Float64Array(places.length);
    let most = -Infinity;
    for (let at = 0; at < places.length; at++) last[at] = most = Math.max(most, end[places[at]]);
    return last;
  });
}

function firstWhere(length, holds) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

function identity({ group_id: groups, generation, attempt }, i) {
  return `${groups[i]}/${generation[i]} a${attempt[i]}`;
}

function clamp(value, low, high) { return Math.min(high, Math.max(low, value)); }
