// Overview keeps what /debug/overview has told: the last answer, and the history, of which
// each answer brings only what is new.

import { count, milliseconds, percent, rate } from "./number.js";

const kept = 150; // rows of the history, as many as the agent keeps

const number = (v) => (typeof v === "number" && Number.isFinite(v) ? v : null);

export class Overview {
  constructor() {
    this.page = null;
    this.rows = [];
  }

  // path is what is to be asked for next.
  path() {
    const last = this.rows.at(-1);
    return last ? `debug/overview?after=${last[0]}` : "debug/overview";
  }

  // take takes an answer and tells whether it is of an agent that was started anew: then
  // the history is that one's from the next answer on. Rows of a time that is yet to come
  // are of before its clock was set back: they are left out, so that what comes after the
  // others is asked for.
  take(page) {
    const again = this.page !== null && this.page.started !== page.started;
    const now = new Date(page.time).getTime() / 1000;
    this.page = page;
    this.rows = again ? [] : [...this.rows, ...page.history].filter((row) => row[0] <= now + 1).slice(-kept);
    return again;
  }

  // replicas are the rows of the fleet's table.
  replicas() {
    const models = this.page.models.map((m) => m.name);
    return (this.page.replicas ?? []).map((r) => {
      const engine = number(r.engine_running);
      const share = number(r.kernel_share);
      const why = r.why ?? "";
      return {
        id: r.id, state: r.state, why, engine: r.engine ?? "", models: r.models.map((i) => models[i]).filter((m) => m !== undefined),
        // An engine that does not tell runs at least what it was sent from here.
        running: engine === null ? number(r.running) : Math.max(engine, 0),
        waiting: (number(r.engine_waiting) ?? 0) + (number(r.pending) ?? 0),
        kv: number(r.kv), hit: number(r.hit_rate), p50: number(r.first_token_p50_ms), p99: number(r.first_token_p99_ms), output: number(r.tokens_per_s),
        prefill: number(r.prefill_tokens_per_s), kernel: share, tier: share === null ? "" : share >= 0.5 ? "packet" : "copy", cache: r.cache ?? "",
        note: why || (r.share < 1 && r.state === "up" ? `comes back slowly, with ${percent(r.share)} of its share` : r.backlog_ms >= 1000 ? `prompts of ${milliseconds(r.backlog_ms)} are ahead` : ""),
      };
    });
  }

  // points are those of the charts, the oldest first. Rows that are older than the charts
  // reach are there when the agent has slept, or its clock was set forward.
  points() {
    const at = new Date(this.page.time).getTime() / 1000;
    const column = new Map(this.page.columns.map((name, i) => [name, i]));
    return this.rows.filter((row) => at - row[0] <= this.span()).map((row) => {
      const of = (name) => number(row[column.get(name)]);
      return {
        ago: Math.max(0, at - row[0]), p50: of("first_token_p50_ms"), p99: of("first_token_p99_ms"),
        requests: of("requests_per_s"), failed: of("failed_per_s"), refused: of("refused_per_s"), hit: of("hit_rate"), expected: of("expected_hit_rate"), output: of("tokens_per_s"), prompt: of("asked_tokens_per_s"),
      };
    });
  }

  span() {
    return kept * this.page.step_s;
  }

  // figures are the numbers of now: name, value and unit. Those of the flow are of some
  // rows of the history, of which one alone is short.
  figures() {
    const page = this.page, points = this.points().slice(-5);
    const mean = (of) => {
      const values = points.map(of).filter((v) => v !== null);
      return values.length > 0 ? values.reduce((a, b) => a + b, 0) / values.length : null;
    };
    // Percentiles have no mean.
    const last = (of) => points.map(of).findLast((v) => v !== null) ?? null;
    // Engines tell nothing of most streams; then it is what was expected.
    const hits = (of) => {
      const told = points.filter((p) => of(p) !== null && p.prompt > 0);
      return told.length > 0 ? told.reduce((n, p) => n + of(p) * p.prompt, 0) / told.reduce((n, p) => n + p.prompt, 0) : null;
    };
    const found = hits((p) => p.hit), expected = hits((p) => p.expected);
    const all = Object.values(page.states).reduce((a, b) => a + b, 0);
    return [
      ["Up", count(page.states.up), `of ${count(all)}`],
      ["Requests", rate(mean((p) => p.requests)), "/s"],
      ["Running", count(page.running)],
      ["Waiting", count(page.waiting)],
      ["TTFT p50", milliseconds(last((p) => p.p50))],
      ["TTFT p99", milliseconds(last((p) => p.p99))],
      ["Hit rate", percent(found ?? expected), found === null && expected !== null ? "expected" : ""],
      ["Generated", rate(mean((p) => p.output)), "tokens/s"],
    ];
  }
}
