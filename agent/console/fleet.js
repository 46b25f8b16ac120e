// The fleet: one row a replica, filtered by text and by state.

import { Grid } from "./grid.js";
import { byID, el, mark, write } from "./element.js";
import { count, milliseconds, percent, rate, unknown } from "./number.js";

// The states by how much they want to be looked at.
export const states = ["down", "ejected", "joining", "leaving", "up"];

const severity = (row) => {
  const i = states.indexOf(row.state);
  return i < 0 ? 0 : i;
};

function text(of, title) {
  return (cell, row) => {
    write(cell, of(row) || unknown);
    mark(cell, "title", title?.(row) || null);
  };
}

// meter draws a part of 1 as a number beside a bar.
function meter(of, high) {
  return (cell, row) => {
    let bar = cell.firstElementChild;
    if (!bar) {
      bar = el("span", { class: "meter", "aria-hidden": "true" }, el("span"));
      cell.append(bar, el("span", { class: "of" }));
    }
    const v = of(row);
    write(cell.lastElementChild, percent(v));
    const width = `${Math.round(Math.min(Math.max(v ?? 0, 0), 1) * 100)}%`;
    if (bar.firstElementChild.style.width !== width) bar.firstElementChild.style.width = width;
    mark(bar, "data-high", high && v >= high ? "" : null);
    mark(bar, "hidden", v === null ? "" : null);
  };
}

// short is the name of a model without whose it is.
const short = (model) => model.slice(model.lastIndexOf("/") + 1) || model;

// drawState draws a state as a shape and a word; one that is not up tells why.
function drawState(cell, row) {
  if (!cell.firstElementChild) cell.append(el("span", { class: "mark", "aria-hidden": "true" }), el("span"));
  mark(cell, "data-state", row.state);
  mark(cell, "title", row.why || null);
  write(cell.lastElementChild, row.state || unknown);
}

function drawNote(cell, row) {
  write(cell, row.note);
  mark(cell, "title", row.note || null);
}

const columns = [
  { key: "state", name: "State", width: 92, keep: 99, value: severity, draw: drawState },
  { key: "id", name: "Replica", width: 120, grow: 2, keep: 100, value: (r) => r.id, draw: text((r) => r.id, (r) => r.id) },
  { key: "model", name: "Model", width: 120, grow: 2, keep: 60, value: (r) => r.models[0] ?? null,
    draw: text((r) => r.models.length > 0 && `${short(r.models[0])}${r.models.length > 1 ? ` +${r.models.length - 1}` : ""}`, (r) => r.models.join("\n")) },
  { key: "engine", name: "Engine", width: 66, keep: 40, value: (r) => r.engine || null, draw: text((r) => r.engine) },
  { key: "running", name: "Running", title: "Requests that the engine runs, of this agent and of others; where it does not tell, those sent from here", width: 80, number: true, keep: 95, value: (r) => r.running,
    draw: text((r) => count(r.running)) },
  { key: "waiting", name: "Waiting", title: "Requests that wait in the engine, and here for it", width: 76, number: true, keep: 94, value: (r) => r.waiting,
    draw: text((r) => count(r.waiting)) },
  { key: "kv", name: "KV use", title: "How full the engine's KV cache is", width: 90, number: true, keep: 90, value: (r) => r.kv, draw: meter((r) => r.kv, 0.9) },
  { key: "hit", name: "Hit rate", title: "The part of prompt tokens that the engine had in its cache", width: 88, number: true, keep: 88, value: (r) => r.hit,
    draw: meter((r) => r.hit) },
  { key: "p50", name: "TTFT p50", title: "Time to first token lately, median", width: 88, number: true, keep: 84, value: (r) => r.p50, draw: text((r) => milliseconds(r.p50)) },
  { key: "p99", name: "p99", title: "Time to first token lately, 99th percentile", width: 72, number: true, keep: 82, value: (r) => r.p99, draw: text((r) => milliseconds(r.p99)) },
  { key: "output", name: "Tokens/s", title: "Tokens that it generates a second", width: 96, number: true, keep: 70, value: (r) => r.output, draw: text((r) => rate(r.output)) },
  { key: "prefill", name: "Prefill/s", title: "Tokens of a prompt a second that it has proved to compute", width: 84, number: true, keep: 66, value: (r) => r.prefill,
    draw: text((r) => count(r.prefill)) },
  { key: "tier", name: "Tier", title: "What carries most of its answers now: the kernel (packet) or this process (copy)", width: 62, keep: 62, value: (r) => r.tier || null, draw: text((r) => r.tier, (r) => (r.kernel === null ? null : `the kernel carries ${percent(r.kernel)} of its tokens`)) },
  { key: "cache", name: "Cache", title: "How what its KV cache holds is known", width: 98, keep: 64, value: (r) => r.cache || null,
    draw: text((r) => r.cache) },
  { key: "note", name: "Note", width: 150, grow: 3, keep: 80, draw: drawNote },
];

export class FleetTable {
  // open is called with a replica's row.
  constructor(open) {
    this.rows = [];
    this.only = null; // a state
    this.grid = new Grid(byID("fleet-grid"), { label: "Replicas", columns, key: (r) => r.id, open, sort: { key: "state", down: false } });
    this.filter = byID("fleet-filter");
    this.count = byID("fleet-count");
    this.filter.addEventListener("input", () => this.draw());
    this.filter.addEventListener("keydown", (e) => {
      if (e.key === "Escape" && this.filter.value === "") this.filter.blur();
      else if (e.key === "Escape") {
        this.filter.value = "";
        this.draw();
      } else if (e.key === "Enter" || e.key === "ArrowDown") {
        this.grid.host.focus();
        this.grid.move(0);
      } else return;
      e.preventDefault();
      e.stopPropagation();
    });
    this.buttons = new Map();
    for (const state of states) {
      const number = el("b", null, "0");
      const button = el("button", { type: "button", "aria-pressed": "false", "data-state": state, click: () => this.choose(state) },
        el("span", { class: "mark", "aria-hidden": "true" }), `${state} `, number);
      this.buttons.set(state, { button, number });
      byID("fleet-states").append(button);
    }
  }

  choose(state) {
    this.only = this.only === state ? null : state;
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const counts = new Map(states.map((s) => [s, 0]));
    const rows = [];
    for (const row of this.rows) {
      row.sought ??= [row.id, row.engine, row.tier, row.cache, row.note, ...row.models].join("\n").toLowerCase();
      if (!words.every((w) => row.sought.includes(w))) continue;
      counts.set(row.state, (counts.get(row.state) ?? 0) + 1);
      if (this.only === null || row.state === this.only) rows.push(row);
    }
    for (const [state, { button, number }] of this.buttons) {
      write(number, count(counts.get(state)));
      mark(button, "aria-pressed", this.only === state);
      mark(button, "hidden", counts.get(state) === 0 && this.only !== state && state !== "up" ? "" : null);
    }
    const all = this.rows.length;
    write(this.count, all === 0 ? "" : rows.length === all ? `${count(all)} replicas` : `${count(rows.length)} of ${count(all)} replicas`);
    this.grid.show(rows, all === 0 ? "No replicas yet: none is configured, and none was discovered." : "None matches. Esc in the filter clears it.");
  }
}
