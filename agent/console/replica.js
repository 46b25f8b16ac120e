// One replica in full: what the fleet, the index and the predictions say of it.

import { el, facts, table } from "./element.js";
import { age, bytes, count, milliseconds, percent, rate, unknown } from "./number.js";

// replicaPages are what is asked for a replica.
export function replicaPages(id) {
  const name = encodeURIComponent(id);
  return [`debug/fleet?replica=${name}`, `debug/index?replica=${name}`, `debug/predictions?replica=${name}&limit=0`];
}

// replica draws a row of the fleet's table and these pages, at a time of the agent.
export function replica(row, [fleet, index, predictions], now) {
  const r = fleet.replicas.find((x) => x.id === row.id);
  if (!r) return [el("p", { class: "verdict" }, "It has left the fleet.")];
  const load = r.load, cache = r.kv_cache;
  const parts = [
    el("p", { class: "verdict" }, el("span", { class: "state", "data-state": r.state }, el("span", { class: "mark", "aria-hidden": "true" }), r.state), r.why ? ` — ${r.why}` : ""),
    facts([
      ["Address", el("code", null, r.url)],
      ["Engine", r.engine || cache.engine || row.engine],
      ["Models", r.models.join(", ")],
      ["Known from", r.source],
      ["Slot", String(r.slot)],
      ["Ejected until", r.ejected_until ? new Date(r.ejected_until).toLocaleTimeString("en-GB") : null],
      ["Ejections", r.ejections > 0 ? count(r.ejections) : null],
      ["Failed in a row", r.failed_checks || r.failed_requests ? `${count(r.failed_checks)} checks, ${count(r.failed_requests)} requests` : null],
      ["Share", r.share < 1 ? `${percent(r.share)}: it comes back slowly` : null],
    ]),
    el("h3", null, "Load"),
    facts([
      ["Of this agent", `${count(r.in_flight)} in flight, ${count(r.pending)} in line`],
      ["Engine's report", load.state === "ok" ? `${load.page}, ${milliseconds(load.age_ms)} old` : `${load.state}${load.why ? `: ${load.why}` : ""}`],
      ["Running", load.running === undefined ? null : count(load.running)],
      ["Waiting", load.waiting === undefined ? null : count(load.waiting)],
      ["Of others", load.foreign ? `${count(load.foreign)}, ${count(load.foreign_waiting)} of them waiting` : null],
      ["KV use", load.kv_usage === undefined ? null : percent(load.kv_usage)],
      ["Hit rate", load.hit_rate === undefined ? null : percent(load.hit_rate)],
      ["First token", row.p50 === null ? null : `${milliseconds(row.p50)} median, ${milliseconds(row.p99)} p99, lately`],
      ["Generated", row.output === null ? null : `${rate(row.output)} tokens/s`],
    ]),
  ];
  for (const c of predictions.calibrations) {
    parts.push(el("h3", null, "Speed"), facts([
      ["A token", `${rate(c.us_per_token)} us; ${count(1e6 / c.us_per_token)} tokens/s`],
      ["A pair of tokens", `${rate(c.ns_per_pair)} ns`],
      ["A prompt", milliseconds(c.ms_per_prompt)],
      ["Learned from", c.samples > 0 ? `${count(c.samples)} first tokens${c.determined ? "" : ", which do not tell the three numbers apart"}` : "nothing yet: this is what is supposed at first"],
      ["Off by", c.samples > 0 ? `${percent(c.error)} in the median` : null],
      ["Became another", c.changes > 0 ? `${count(c.changes)} times` : null],
    ]));
  }
  for (const s of index.slots) {
    const e = s.events;
    parts.push(el("h3", null, "KV cache"), facts([
      ["Known", `${s.state}${s.why ? `: ${s.why}` : ""}`],
      ["For", age((new Date(now) - new Date(s.since)) / 1000)],
      ["Model", s.model],
      ["Rank", s.rank > 0 ? String(s.rank) : null],
      ["Capacity", s.capacity > 0 ? `${count(s.capacity)} blocks of ${count(s.block_size)} tokens` : null],
      ["Blocks", Object.entries(s.blocks_by_tier).filter(([, n]) => n > 0).map(([tier, n]) => `${count(n)} ${tier}`).join(", ") || "none"],
      ["Guessed", s.guessed || s.expected ? `${count(s.guessed)}, and ${count(s.expected)} on their way` : null],
      ["Memory here", bytes(s.bytes)],
      ["Restarts", cache.restarts > 0 ? count(cache.restarts) : null],
      ["Cached tokens", s.prediction.requests > 0 ? `${count(s.prediction.predicted_tokens)} predicted, ${count(s.prediction.actual_tokens)} found, in ${count(s.prediction.requests)} answers` : null],
    ]));
    if (!e) continue;
    parts.push(el("h3", null, "KV events"), facts([
      ["Publisher", el("code", null, e.endpoint)],
      ["Followed", e.connected ? `${milliseconds(e.lag_ms)} behind` : "not connected"],
      ["Trouble", e.trouble],
      ["Events", `${count(e.stored)} stored, ${count(e.removed)} removed, ${count(e.cleared)} cleared`],
      ["Gaps", e.gaps || e.lost_batches ? `${count(e.gaps)}; ${count(e.replays)} replays, ${count(e.lost_batches)} batches lost` : "none"],
    ]));
  }
  if (predictions.summary.length > 0) {
    const part = (v) => (v === null ? unknown : percent(v));
    parts.push(el("h3", null, "Predictions"), table("Predictions",
      [{ name: "Model", class: "name" }, { name: "Decisions", number: true }, { name: "Came / predicted", number: true }, { name: "Off, median", number: true }, { name: "p90", number: true }],
      predictions.summary.map((s) => [s.model, count(s.decisions), part(s.bias), part(s.median_error), part(s.p90_error)])));
  }
  return parts;
}
