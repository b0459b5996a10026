// The page: what is shown of the timeline, and what the pointer and the keys do to it.

const element = (id) => document.getElementById(id);

async function open() {
  const timeline = await decodeTimeline(element("data").textContent);
  timeline.placeOfGroup = new Map(Array.from(timeline.groups.group_id, (id, place) => [id, place]));
  new Page(timeline);
  document.documentElement.dataset.ready = "true";
}

class Page {
  constructor(timeline) {
    this.timeline = timeline;
    if (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches) {
      document.documentElement.dataset.theme = "dark";
    }
    this.painter = new Painter(element("picture"), timeline);
    this.hidden = new Uint8Array(OUTCOMES.length);
    this.shown = new Uint8Array(timeline.attempts.length);
    this.searching = false;
    this.selected = -1;
    this.compressed = true;
    this.view = { u0: 0, u1: 1, top: 0, rowHeight: 1 };
    this.bend();
    this.painter.resize();
    this.arrange("worker");
    this.drawLegend();
    this.listen();
    new ResizeObserver(() => { this.painter.resize(); this.fitRows(); this.drawNow(); }).observe(element("picture"));
  }

  bend() {
    const { attempts, lives, span } = this.timeline;
    this.scale = new TimeScale(lives, span, this.compressed);
    const [begin, end] = [attempts.begin, attempts.end].map((times) => this.scale.bentColumn(times));
    this.bent = { begin, end, lastEnd: lastEnds(this.painter.order, end), sealed: sealedTokens(this.timeline, end) };
    Object.assign(this.view, { u0: -this.scale.length * 0.008, u1: this.scale.length * 1.012 });
  }

  arrange(mode) {
    this.layout = layOut(this.timeline, mode);
    element("by-worker").setAttribute("aria-pressed", String(mode === "worker"));
    element("by-group").setAttribute("aria-pressed", String(mode === "group"));
    this.followRows = true;
    this.fitRows();
  }

  // As long as nobody has moved the rows by hand, they are those that have something in the time that is shown.
  fitRows() {
    if (!this.followRows) return;
    const { tops, height } = this.layout, { begin, end } = this.bent, { view } = this;
    let first = Infinity, last = -Infinity;
    if (this.layout.mode === "group") {
      for (const i of whatIsInView(this.painter.order, this.bent, view)) {
        if (end[i] < view.u0 || begin[i] > view.u1 || tops[i] < 0) continue;
        if (tops[i] < first) first = tops[i];
        if (tops[i] + 1 > last) last = tops[i] + 1;
      }
    }
    if (first > last) [first, last] = [0, height];
    view.rowHeight = Math.min(26, this.painter.lanesHeight / (last - first + 0.6));
    view.top = first - 0.3;
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    this.painter.draw(this);
    this.placeRing();
    const { view, scale, timeline } = this;
    const from = clamp(scale.toTime(view.u0), 0, timeline.span), to = clamp(scale.toTime(view.u1), 0, timeline.span);
    element("range").textContent = `${elapsed(from)} to ${elapsed(to)} of ${elapsed(timeline.span)} · from ${clock(timeline.begin_us + from)}`;
  }

  // ---- the view

  zoom(factor, x = GUTTER + this.painter.plotWidth / 2) {
    const { view, scale, painter } = this;
    const u = view.u0 + ((x - GUTTER) / painter.plotWidth) * (view.u1 - view.u0);
    const width = clamp((view.u1 - view.u0) * factor, 50, scale.length * 1.3);
    const share = (u - view.u0) / (view.u1 - view.u0);
    view.u0 = u - share * width;
    view.u1 = view.u0 + width;
    this.keepInView();
  }

  pan(pixels) {
    const { view, painter } = this, du = (pixels * (view.u1 - view.u0)) / painter.plotWidth;
    view.u0 += du;
    view.u1 += du;
    this.keepInView();
  }

  keepInView() {
    const { view, scale } = this, width = view.u1 - view.u0, slack = width * 0.15;
    view.u0 = clamp(view.u0, -slack, Math.max(-slack, scale.length - width + slack));
    view.u1 = view.u0 + width;
    this.fitRows();
    this.draw();
  }

  scroll(pixels) {
    const { view, layout, painter } = this, room = painter.lanesHeight / view.rowHeight;
    this.followRows = false;
    view.top = clamp(view.top + pixels / view.rowHeight, -0.3, Math.max(-0.3, layout.height - room + 0.3));
    this.draw();
  }

  stretch(factor, y = TOP + this.painter.lanesHeight / 2) {
    const { view, layout, painter } = this, row = view.top + (y - TOP) / view.rowHeight;
    view.rowHeight = clamp(view.rowHeight * factor, painter.lanesHeight / (layout.height + 0.6), 40);
    view.top = row - (y - TOP) / view.rowHeight;
    this.scroll(0);
  }

  fit() {
    Object.assign(this.view, { u0: -this.scale.length * 0.008, u1: this.scale.length * 1.012 });
    this.followRows = true;
    this.fitRows();
    this.draw();
  }

  // ---- one attempt

  select(i, { bring = false } = {}) {
    this.selected = i;
    const details = element("details");
    details.hidden = i < 0;
    if (i >= 0) {
      const { attempts } = this.timeline;
      showFacts(details, this.painter.colours[OUTCOMES[attempts.outcome[i]]], `group ${attempts.group_id[i]}, sibling ${attempts.generation[i]}, attempt ${attempts.attempt[i]}`, attemptFacts(this.timeline, i));
      const close = Object.assign(document.createElement("button"), { type: "button", textContent: "✕" });
      close.setAttribute("aria-label", "Close");
      close.addEventListener("click", () => this.select(-1));
      details.prepend(close);
      if (bring) this.bring(i);
    }
    this.draw();
  }

  bring(i) {
    const { view, bent, layout, painter } = this;
    const width = Math.min(view.u1 - view.u0, Math.max(12 * (bent.end[i] - bent.begin[i]), this.scale.length / 200));
    const middle = (bent.begin[i] + bent.end[i]) / 2;
    Object.assign(view, { u0: middle - width / 2, u1: middle + width / 2 });
    this.fitRows();
    if (view.rowHeight < 9) {
      this.followRows = false;
      view.rowHeight = 9;
      view.top = layout.tops[i] - painter.lanesHeight / 2 / view.rowHeight;
    }
    this.keepInView();
  }

  step(direction) {
    const { attempts } = this.timeline, { length } = attempts;
    for (let turn = 1; turn <= length; turn++) {
      const i = (((this.selected < 0 ? (direction > 0 ? -1 : 0) : this.selected) + direction * turn) % length + length) % length;
      if ((this.searching ? this.shown[i] : true) && !this.hidden[attempts.outcome[i]]) return this.select(i, { bring: true });
    }
    return undefined;
  }

  nextKill() {
    const kills = this.timeline.lives.filter((life) => life.how === "killed").map((life) => this.scale.toU(life.end));
    const middle = (this.view.u0 + this.view.u1) / 2, width = Math.min(this.view.u1 - this.view.u0, this.scale.length / 4);
    const next = kills.find((u) => u > middle + width * 0.01) ?? kills[0];
    if (next === undefined) return;
    Object.assign(this.view, { u0: next - width / 2, u1: next + width / 2 });
    this.keepInView();
  }

  placeRing() {
    const overlay = element("overlay"), ring = element("ring"), { painter, view, selected } = this;
    if (overlay.width !== painter.canvas.width || overlay.height !== painter.canvas.height) {
      overlay.width = painter.canvas.width;
      overlay.height = painter.canvas.height;
    }
    const context = overlay.getContext("2d");
    context.setTransform(painter.ratio, 0, 0, painter.ratio, 0, 0);
    context.clearRect(0, 0, painter.width, painter.height);
    ring.hidden = true;
    if (selected < 0) return;
    const { attempts } = this.timeline;
    context.strokeStyle = painter.colours.ink;
    context.lineWidth = 1;
    context.beginPath();
    context.rect(GUTTER, TOP, painter.plotWidth, painter.lanesHeight);
    context.clip();
    for (let i = 0; i < attempts.length; i++) {
      if (attempts.group_id[i] === attempts.group_id[selected]) context.strokeRect(...this.box(i, 1));
    }
    const [x, y, width, height] = this.box(selected, 2);
    if (x + width < GUTTER || x > painter.width || y + height < TOP || y > painter.lanesBottom) return;
    Object.assign(ring.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
    ring.hidden = false;
  }

  box(i, margin) {
    const { painter, view, bent, layout } = this;
    const x = painter.xOf(view, bent.begin[i]), right = painter.xOf(view, bent.end[i]), y = painter.yOf(view, layout.tops[i]);
    return [x - margin, y - margin, Math.max(2, right - x) + 2 * margin, Math.max(2, view.rowHeight * 0.9) + 2 * margin];
  }

  hover(x, y) {
    const tip = element("tip"), { timeline, painter } = this;
    const i = attemptAt(painter, this, x, y), strip = i < 0 ? stripAt(painter, this, x, y) : null;
    tip.hidden = i < 0 && !strip;
    if (i >= 0) {
      showFacts(tip, painter.colours[OUTCOMES[timeline.attempts.outcome[i]]], identity(timeline.attempts, i), attemptFacts(timeline, i));
    } else if (strip) {
      showFacts(tip, null, ...strip);
    }
    if (tip.hidden) return;
    tip.style.left = `${x + 18 + tip.offsetWidth < painter.width ? x + 18 : Math.max(4, x - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${clamp(y + 14, 4, Math.max(4, painter.height - tip.offsetHeight - 4))}px`;
  }

  // ---- controls

  drawLegend() {
    const { attempts, outcomes } = this.timeline;
    const counts = new Array(OUTCOMES.length).fill(0);
    for (let i = 0; i < attempts.length; i++) counts[attempts.outcome[i]]++;
    element("legend").replaceChildren(...OUTCOMES.map((name, code) => {
      const button = document.createElement("button"), colour = document.createElement("i"), count = document.createElement("b");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!this.hidden[code]));
      colour.style.background = `var(--${name})`;
      count.textContent = counts[code].toLocaleString("en");
      button.append(colour, outcomes[code], count);
      button.hidden = counts[code] === 0;
      button.addEventListener("click", () => {
        this.hidden[code] ^= 1;
        button.setAttribute("aria-pressed", String(!this.hidden[code]));
        this.draw();
      });
      return button;
    }));
  }

  find(words) {
    this.searching = Boolean(words.trim());
    const found = this.searching ? search(this.timeline, words, this.shown) : 0;
    element("found").textContent = this.searching ? found.toLocaleString("en") : "";
    this.draw();
  }

  setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    this.painter.colours = readColours();
    this.drawNow();
  }

  listen() {
    const canvas = element("picture");
    const on = (id, act) => element(id).addEventListener("click", act);
    on("by-worker", () => { this.arrange("worker"); this.draw(); });
    on("by-group", () => { this.arrange("group"); this.draw(); });
    on("fit", () => this.fit());
    on("theme", () => this.setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
    on("gaps", () => {
      this.compressed = !this.compressed;
      element("gaps").setAttribute("aria-pressed", String(this.compressed));
      this.bend();
      this.fitRows();
      this.draw();
    });
    on("help", () => this.showKeys(element("keys").hidden));
    element("search").addEventListener("input", (event) => this.find(event.target.value));
    element("search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") {
        event.target.value = "";
        this.find("");
        canvas.focus();
      }
      event.stopPropagation();
    });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    listenToPointer(this, canvas);
    document.addEventListener("keydown", (event) => this.key(event));
    let before = "";
    addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme ?? "light"; this.setTheme("light"); });
    addEventListener("afterprint", () => this.setTheme(before));
  }

  showKeys(shown) {
    element("keys").hidden = !shown;
    element("help").setAttribute("aria-expanded", String(shown));
  }

  wheel(event) {
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 16 : 1, box = event.currentTarget.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    if (event.ctrlKey) this.stretch(Math.exp(-event.deltaY * pixels * 0.002), y);
    else if (x < GUTTER) this.scroll(event.deltaY * pixels);
    else if (event.shiftKey) this.pan((event.deltaY || event.deltaX) * pixels);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX * pixels);
    else this.zoom(Math.exp(event.deltaY * pixels * 0.0016), x);
  }

  key(event) {
    if (event.target instanceof HTMLInputElement || event.metaKey || event.ctrlKey || event.altKey) return;
    const page = this.painter.plotWidth / 6;
    const act = {
      ArrowLeft: () => this.pan(-page), ArrowRight: () => this.pan(page),
      ArrowUp: () => this.scroll(-60), ArrowDown: () => this.scroll(60),
      "+": () => (event.shiftKey && event.code !== "Equal" ? this.stretch(1.4) : this.zoom(0.7)), "=": () => this.zoom(0.7),
      "*": () => this.stretch(1.4), "-": () => this.zoom(1 / 0.7), _: () => this.stretch(1 / 1.4),
      0: () => this.fit(), n: () => this.step(1), p: () => this.step(-1), k: () => this.nextKill(),
      g: () => { this.arrange(this.layout.mode === "group" ? "worker" : "group"); this.draw(); },
      "/": () => element("search").focus(), "?": () => this.showKeys(element("keys").hidden),
      Escape: () => { this.showKeys(false); this.select(-1); },
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    // Arrows and letters belong to the page only while nothing else has the focus.
    event.preventDefault();
    element("tip").hidden = true;
    act();
  }
}

open().catch((error) => {
  const said = document.createElement("p");
  said.textContent = `The picture could not be drawn: ${error}`;
  document.querySelector("main").replaceChildren(said);
  throw error;
});
