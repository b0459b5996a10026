// Which row each attempt is drawn in: by worker (one row for each attempt it runs at once), or by group (one a sibling).

function layOut(timeline, mode) {
  const { attempts, groups } = timeline;
  const byWorker = mode === "worker";
  const sizes = byWorker ? timeline.slots : Array.from(groups.num_generations);
  const gap = byWorker ? 0.8 : 0.35;
  const lanes = [];
  let top = 0;
  for (let lane = 0; lane < sizes.length; lane++) {
    lanes.push({ top, rows: Math.max(1, sizes[lane]), label: byWorker ? workerName(timeline, lane) : groupName(timeline, lane) });
    top += Math.max(1, sizes[lane]) + gap;
  }
  const tops = new Float64Array(attempts.length);
  const laneOf = new Int32Array(attempts.length);
  const places = byWorker ? null : new Map(Array.from(groups.group_id, (id, place) => [id, place]));
  for (let i = 0; i < attempts.length; i++) {
    const lane = byWorker ? attempts.worker[i] : places.get(attempts.group_id[i]);
    laneOf[i] = lane ?? -1;
    tops[i] = lane === undefined ? -1e9 : lanes[lane].top + (byWorker ? attempts.slot[i] : attempts.generation[i]);
  }
  return { mode, lanes, tops, laneOf, height: Math.max(1, top - gap) };
}

function workerName(timeline, worker) {
  return timeline.workers[worker] || `worker not known (dispatched before seq ${timeline.first_seq.toLocaleString("en")})`;
}

function groupName(timeline, place) {
  return `${timeline.groups.group_id[place]} · ${timeline.samples[place]}`;
}
