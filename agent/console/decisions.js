// The last decisions, the newest first. They can be held as they are while they are read.

import { Grid } from "./grid.js";
import { byID, el, mark, write } from "./element.js";
import { clock, count, milliseconds, percent, unknown } from "./number.js";

const most = 200; // that are kept here, as many as the agent keeps

function cell(of, title) {
  return (node, row) => {
    write(node, of(row));
    mark(node, "title", title?.(row) ?? null);
  };
}

function drawWinner(node, row) {
  if (!node.firstElementChild) node.append(el("bdi"), el("span", { class: "tag" }));
  write(node.firstElementChild, row.winner || "none");
  write(node.lastElementChild, row.attempt > 1 ? `try ${row.attempt}` : "");
  mark(node, "title", [row.winner, row.reason, row.admission].filter(Boolean).join("\n"));
  mark(node, "data-state", row.winner ? null : "down");
}

// The error is how far the first token was off, as a part of what it has taken.
function drawCame(node, row) {
  const o = row.outcome;
  write(node, o ? milliseconds(o.first_token_ms) : "…");
  mark(node, "title", o && row.predicted_ms !== null && o.first_token_ms ? `${percent(Math.abs(o.first_token_ms - row.predicted_ms) / o.first_token_ms)} off` : null);
}

const ended = (row) => (!row.outcome ? "running" : row.outcome.outcome);

const columns = [
  { key: "time", name: "Time", width: 82, keep: 90, draw: cell((r) => clock(r.time), (r) => r.time) },
  { key: "winner", name: "Replica", width: 100, grow: 2, keep: 100, draw: drawWinner },
  { key: "model", name: "Model", width: 90, grow: 1, keep: 40, draw: cell((r) => r.model, (r) => r.model) },
  { key: "tokens", name: "Prompt", title: "Tokens of the prompt", width: 64, number: true, keep: 80, draw: cell((r) => count(r.prompt_tokens), (r) => (r.exact ? "exact" : "an estimate")) },
  { key: "cached", name: "Cached", title: "Of these, tokens that the replica is expected to have", width: 66, number: true, keep: 82,
    draw: cell((r) => (r.prompt_tokens > 0 ? percent(r.cached_tokens / r.prompt_tokens) : unknown), (r) => `${r.cached_tokens} tokens`) },
  { key: "predicted", name: "Predicted", title: "Expected time to first token", width: 80, number: true, keep: 88, draw: cell((r) => milliseconds(r.predicted_ms)) },
  { key: "came", name: "Came", title: "Time to first token", width: 74, number: true, keep: 87, draw: drawCame },
  { key: "outcome", name: "Outcome", width: 92, keep: 60, draw: cell(ended, (r) => (r.outcome ? `status ${r.outcome.status}` : null)) },
  { key: "shadows", name: "Shadows", title: "Shadow policies that would have chosen another replica", width: 80, keep: 45,
    draw: cell((r) => (r.disagreed?.length ? `${r.disagreed.length} differ${r.disagreed.length === 1 ? "s" : ""}` : ""), (r) => r.disagreed?.join("\n") || null) },
  { key: "reason", name: "Reason", width: 110, grow: 2, keep: 50, draw: cell((r) => r.reason || r.admission || "", (r) => r.reason) },
];

export class DecisionList {
  // open is called with a decision's row.
  constructor(open) {
    this.byID = new Map();
    this.rows = [];
    this.held = false;
    this.seq = 0;
    this.kept = this.made = 0;
    this.grid = new Grid(byID("decisions-grid"), { label: "Decisions, the newest first", columns, key: (r) => r.id, open, keepPlace: true, empty: "No request yet." });
    this.button = byID("decisions-pause");
    this.count = byID("decisions-count");
    this.button.addEventListener("click", () => this.hold(!this.held));
  }

  hold(held) {
    this.held = held;
    mark(this.button, "aria-pressed", held);
    write(this.button, held ? "Go on" : "Pause");
    this.draw();
  }

  // forget is called when the agent has been started anew: its numbers begin again.
  forget() {
    this.byID.clear();
    this.seq = 0;
  }

  // take takes an answer of /debug/decisions?after=.
  take(answer) {
    if (answer.seq < this.seq) this.forget();
    this.seq = answer.seq;
    this.kept = answer.kept;
    this.made = answer.made;
    for (const row of answer.decisions) this.byID.set(row.id, row);
    if (this.byID.size > most) {
      const old = [...this.byID.keys()].sort((a, b) => a - b).slice(0, this.byID.size - most);
      for (const id of old) this.byID.delete(id);
    }
    this.draw();
  }

  draw() {
    if (!this.held) {
      this.rows = [...this.byID.values()].sort((a, b) => b.id - a.id);
      this.shown = this.kept;
    }
    const behind = this.kept - (this.shown ?? 0);
    write(this.count, this.held && behind > 0 ? `held; ${count(behind)} newer` : this.held ? "held"
      : this.kept < this.made ? `${count(this.kept)} of ${count(this.made)} were kept to look at` : "");
    this.grid.show(this.rows);
  }
}
