// What is under the pointer, what was found, and what is said about it. Text of the log only ever becomes a text node.

function attemptAt(painter, { view, layout, bent, hidden }, x, y) {
  if (x < GUTTER || y < TOP || y > painter.lanesBottom) return -1;
  const { outcome } = painter.timeline.attempts;
  const perPixel = (view.u1 - view.u0) / painter.plotWidth;
  const u = view.u0 + (x - GUTTER) * perPixel, row = view.top + (y - TOP) / view.rowHeight;
  const wide = 2.5 * perPixel, high = Math.max(0, 1.5 / view.rowHeight - 0.5);
  let found = -1;
  for (const i of whatIsInView(painter.order, bent, { u0: u - wide, u1: u + wide })) {
    const top = layout.tops[i];
    if (row < top - high || row > top + 1 + high || u < bent.begin[i] - wide || u > bent.end[i] + wide || hidden[outcome[i]]) continue;
    const inside = row >= top && row <= top + 1 && u >= bent.begin[i] && u <= bent.end[i];
    const before = found >= 0 && row >= layout.tops[found] && row <= layout.tops[found] + 1 && u >= bent.begin[found] && u <= bent.end[found];
    if (inside || !before) found = i;
  }
  return found;
}

// The moment, step or checkpoint under the pointer, in the strips above the lanes: [title, facts], or null.
function stripAt(painter, { view, scale }, x, y) {
  const { lives, steps, checkpoints } = painter.timeline;
  const near = (begin, end) => x >= painter.xOf(view, scale.toU(begin)) - 3 && x <= painter.xOf(view, scale.toU(end)) + 3;
  if (x < GUTTER || y < AXIS || y >= TOP) return null;
  if (y < AXIS + LIVES) {
    const marks = painter.timeline.marks.filter((mark) => near(mark.time, mark.time));
    if (marks.length && y > AXIS + LIVES - 7) return [elapsed(marks[0].time), marks.slice(0, 6).map((mark) => [`seq ${mark.seq}`, mark.text])];
    const life = lives.findLast((one) => near(one.begin, one.end));
    return life && [`life ${life.epoch}`, lifeFacts(life)];
  }
  if (y < AXIS + LIVES + STEPS) {
    for (let i = steps.length - 1; i >= 0; i--) {
      if (near(steps.begin[i], steps.end[i])) return [`step ${steps.train_step[i]}${steps.undone[i] ? ", undone by a restart" : ""}`, stepFacts(steps, i)];
    }
    const { weights } = painter.timeline, i = weights.time.findIndex((time) => near(time, time));
    return i < 0 ? null : [`weights ${weights.weight_version[i]}`, [["published", elapsed(weights.time[i])], ["seq", weights.seq[i]]]];
  }
  const checkpoint = checkpoints.findLast((one) => near(one.begin, one.end));
  return checkpoint && [checkpoint.name, checkpointFacts(checkpoint)];
}

function lifeFacts(life) {
  return [["process", life.process], ["began", `${elapsed(life.begin)} (${clock(life.began_us)})`], ["lasted", lasting(life.end - life.begin)],
    ["seq", `${life.first_seq} to ${life.last_seq}`], ["end", life.how],
    life.restored && ["restored", `${life.restored_checkpoint ?? "the start"}, step ${life.restored_step}`],
    life.tokens_reused !== null && ["tokens saved", life.tokens_reused.toLocaleString("en")],
    life.tokens_regenerated !== null && ["tokens redone", life.tokens_regenerated.toLocaleString("en")]].filter(Boolean);
}

function stepFacts(steps, i) {
  return [["applied", elapsed(steps.end[i])], ["took", lasting(steps.end[i] - steps.begin[i])], ["groups", steps.groups[i]],
    ["tokens", steps.tokens[i].toLocaleString("en")], ["staleness", `mean ${steps.mean_staleness[i] / 1000}, max ${steps.max_staleness[i]}`],
    ["seq", steps.seq[i]]];
}

function checkpointFacts(one) {
  return [one.kind && ["kind", one.kind], one.failed && ["failed", one.failed, "why"], one.detail && ["detail", one.detail],
    ["committed", elapsed(one.end)], ["took", lasting(one.end - one.begin)], one.train_step !== null && ["step", one.train_step],
    one.position_seq && ["holds up to", `seq ${one.position_seq}`], ["seq", one.seq]].filter(Boolean);
}

function attemptFacts(timeline, i) {
  const { attempts: a, reasons, details } = timeline;
  const place = timeline.placeOfGroup.get(a.group_id[i]);
  const reason = a.reason[i] ? reasons[a.reason[i] - 1] : null;
  const verdict = a.superseded[i] ? "superseded" : "left with its group";
  return [
    ["outcome", timeline.outcomes[a.outcome[i]]],
    reason && ["reason", reason, "why"],
    details[a.detail[i]] && ["detail", details[a.detail[i]]],
    ["worker", workerName(timeline, a.worker[i])],
    a.begin_seq[i] ? ["dispatched", `${elapsed(a.begin[i])}, seq ${a.begin_seq[i]}`] : ["dispatched", "in dropped history"],
    a.seal_seq[i] ? ["sealed", `${elapsed(a.end[i])}, seq ${a.seal_seq[i]}`] : a.outcome[i] === 2 ? ["last seen", elapsed(a.end[i])] : ["ended", elapsed(a.end[i])],
    ["lasted", lasting(a.end[i] - a.begin[i])],
    a.verdict_seq[i] && [verdict, `${elapsed(a.verdict[i])}, seq ${a.verdict_seq[i]}`],
    a.late_seq[i] && ["late result", `${elapsed(a.late[i])}, seq ${a.late_seq[i]}: ${reasons[a.late_reason[i] - 1]}`],
    a.tokens[i] >= 0 && ["tokens", a.tokens[i].toLocaleString("en")],
    ["weights", a.weight_version[i]],
    place !== undefined && ["prompt", `${timeline.samples[place]} (${timeline.tasks[timeline.groups.task[place]]}, ${timeline.agents[timeline.groups.agent[place]]})`],
    place !== undefined && ["group", groupEnd(timeline, place)],
  ].filter(Boolean);
}

function groupEnd({ groups, reasons, ends }, place) {
  const end = ends[groups.end[place]];
  if (end === "applied") return `trained on in step ${groups.train_step[place]}`;
  return groups.reason[place] ? `${end}: ${reasons[groups.reason[place] - 1]}` : end;
}

function showFacts(element, colour, title, facts) {
  const heading = document.createElement("h2"), list = document.createElement("dl");
  if (colour) heading.append(Object.assign(document.createElement("i"), { style: `background:${colour}` }));
  heading.append(title);
  for (const [name, value, role] of facts) {
    const term = document.createElement("dt"), fact = document.createElement("dd");
    term.textContent = name;
    fact.textContent = value;
    if (role) fact.className = role;
    list.append(term, fact);
  }
  element.replaceChildren(heading, list);
}

function clock(us) { return `${new Date(us / 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`; }

// Marks the attempts that fit what was typed. A number is a group, 12/3 a sibling of it; all else is looked for in names.
function search(timeline, words, shown) {
  const { attempts } = timeline, wanted = words.trim().toLowerCase();
  const sibling = /^g?(\d+)(?:\s*[/.]\s*s?(\d+))?$/.exec(wanted);
  const [, field, rest] = /^(?:(group|sample|task|agent|reason|worker|outcome):)?\s*(.*)$/.exec(wanted);
  const matching = (list, name) => list.map((text) => (!field || field === name) && Boolean(rest) && text.toLowerCase().includes(rest));
  const samples = matching(timeline.samples, "sample"), workers = matching(timeline.workers, "worker");
  const tasks = matching(timeline.tasks, "task"), agents = matching(timeline.agents, "agent");
  const reasons = matching(timeline.reasons, "reason"), details = matching(timeline.details, "reason");
  const outcomes = matching(timeline.outcomes, "outcome");
  let found = 0;
  for (let i = 0; i < attempts.length; i++) {
    let fits;
    const place = timeline.placeOfGroup.get(attempts.group_id[i]);
    if (sibling || field === "group") {
      const [, group, generation] = sibling ?? /^(\d*)(?:\/(\d+))?/.exec(rest);
      fits = attempts.group_id[i] === Number(group) && (generation === undefined || attempts.generation[i] === Number(generation));
    } else {
      fits = workers[attempts.worker[i]] || outcomes[attempts.outcome[i]] || (attempts.reason[i] && (reasons[attempts.reason[i] - 1] || details[attempts.detail[i]])) ||
        (attempts.late_reason[i] && reasons[attempts.late_reason[i] - 1]) ||
        (place !== undefined && (samples[place] || tasks[timeline.groups.task[place]] || agents[timeline.groups.agent[place]]));
    }
    shown[i] = fits ? 1 : 0;
    found += shown[i];
  }
  return found;
}
