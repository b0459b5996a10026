// Time on the screen. The time between two lives may be shown as a narrow strip, so what is drawn is a bent time, u.

class TimeScale {
  constructor(lives, span, compressed) {
    this.knots = [[0, 0]];
    this.gaps = [];
    const alive = lives.reduce((sum, life) => sum + life.end - life.begin, 0);
    const narrow = Math.max(1, alive * 0.025);
    for (let next = 1; next < lives.length; next++) {
      const from = lives[next - 1].end, to = lives[next].begin;
      if (to - from <= narrow) continue;
      const [t, u] = this.knots.at(-1);
      const begin = u + (from - t);
      const width = compressed ? narrow : to - from;
      this.knots.push([from, begin], [to, begin + width]);
      this.gaps.push({ from, to, begin, end: begin + width, compressed });
    }
    this.length = Math.max(1, this.toU(span));
  }

  toU(t) { return bend(this.knots, t, 0, 1); }
  toTime(u) { return bend(this.knots, u, 1, 0); }

  bentColumn(times) {
    return this.knots.length === 1 ? times : times.map((time) => (time < 0 ? time : this.toU(time)));
  }
}

function bend(knots, value, from, to) {
  let low = 0;
  for (let high = knots.length - 1; low < high;) {
    const middle = (low + high + 1) >> 1;
    if (knots[middle][from] <= value) low = middle; else high = middle - 1;
  }
  const knot = knots[low], next = knots[low + 1];
  if (!next) return knot[to] + (value - knot[from]);
  const width = next[from] - knot[from];
  return knot[to] + (width ? ((value - knot[from]) * (next[to] - knot[to])) / width : 0);
}

const TICKS = [1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1.5e7, 3e7, 6e7, 1.2e8, 3e8, 6e8, 9e8,
  1.8e9, 3.6e9, 7.2e9, 1.08e10, 2.16e10, 4.32e10, 8.64e10, 1.728e11, 6.048e11];

function tickStep(microsecondsPerPixel) {
  return TICKS.find((step) => step / microsecondsPerPixel >= 84) ?? TICKS.at(-1);
}

function elapsed(us, step = 0) {
  const seconds = us / 1e6;
  if (seconds < 60) return `${seconds.toFixed(step && step < 1e6 ? (step < 1e4 ? 3 : step < 1e5 ? 2 : 1) : step ? 0 : 3)} s`;
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  const rest = step && step >= 1e6 ? two(seconds % 60) : (seconds % 60).toFixed(step && step < 1e4 ? 3 : 1).padStart(step && step < 1e4 ? 6 : 4, "0");
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}:${rest}`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours}:${two(minutes % 60)}:${rest}` : `${Math.floor(hours / 24)}d ${two(hours % 24)}:${two(minutes % 60)}`;
}

function lasting(us) {
  if (us < 1e3) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1e3).toFixed(us < 1e4 ? 1 : 0)} ms`;
  if (us < 6e7) return `${(us / 1e6).toFixed(us < 1e7 ? 2 : 1)} s`;
  return us < 3.6e9 ? `${(us / 6e7).toFixed(1)} min` : `${(us / 3.6e9).toFixed(1)} h`;
}
