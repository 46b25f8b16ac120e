// The panels below the tables: policies and their shadows, admission, the datapath. Each
// is drawn from one page of the agent, and only when that has changed.

import { byID, el, facts, table, write } from "./element.js";
import { clock, count, milliseconds, percent, rate, signed } from "./number.js";

// Panel redraws its body when what it is drawn from is another. What is open in it or
// scrolled stays: the body is only replaced for new content.
export class Panel {
  constructor(id, draw) {
    this.body = byID(id);
    this.note = byID(`${id}-age`);
    this.draw = draw;
    this.last = "";
    this.at = "";
  }

  // fail tells that the page could not be had, and how old what is shown is.
  fail(why) {
    write(this.note, this.at === "" ? why : `of ${this.at}: ${why}`);
  }

  show(page) {
    this.at = clock(new Date());
    write(this.note, "");
    const text = JSON.stringify(page);
    if (text === this.last) return;
    this.last = text;
    const had = this.body.contains(document.activeElement);
    const scrolled = [...this.body.querySelectorAll(".scroll")].map((n) => n.scrollLeft);
    this.body.replaceChildren(...this.draw(page));
    this.body.querySelectorAll(".scroll").forEach((n, i) => {
      n.scrollLeft = scrolled[i] ?? 0;
      if (had && i === 0) n.focus();
    });
  }
}

// drawShadows draws /debug/policy. A regret above zero is what the live policy has lost
// against the shadow, as far as is known.
export function drawShadows(page) {
  const parts = [];
  for (const m of page.models) {
    const title = el("h3", null, el("bdi", null, m.model), el("span", { class: "hint" }, ` is chosen for by ${m.policy}, among ${count(m.replicas)}`));
    if (m.shadows.length === 0) {
      parts.push(title, el("p", { class: "hint" }, "No shadow policy is configured: routing.shadows names those that are to be compared."));
      continue;
    }
    const most = Math.max(...m.shadows.flatMap((s) => [Math.abs(s.p10_ms), Math.abs(s.p90_ms), Math.abs(s.predicted_ms)]), 1);
    parts.push(title, table(`Shadows of ${m.model}`,
      [{ name: "Shadow" }, { name: "Agreed", number: true }, { name: "Regret expected", number: true }, { name: "observed", number: true }, { name: "p10 to p90" }, { name: "Live, it would be" }],
      m.shadows.map((s) => [s.name, s.decisions > 0 ? percent(s.agreed / s.decisions) : "–", exact(s.predicted_ms, s.decisions), exact(s.observed_ms, s.compared),
        whiskers(s, most), s.compared > 0 ? verdict(s) : "not compared yet"])));
  }
  if (parts.length === 0) parts.push(el("p", { class: "hint" }, "No model is served yet."));
  return parts;
}

const exact = (v, n) => el("span", { title: n > 0 ? `${v} ms` : null }, n > 0 ? signed(v) : "–");

function verdict(s) {
  if (Math.abs(s.predicted_ms) < 0.5) return "the same";
  return s.predicted_ms > 0 ? "better" : "worse";
}

// whiskers draws where most regrets lie, around a line that is zero.
function whiskers(s, most) {
  const at = (v) => 50 + Math.max(-1, Math.min(1, v / most)) * 48;
  const range = el("span", { class: "range" }), median = el("span", { class: "median" });
  range.style.left = `${at(s.p10_ms)}%`;
  range.style.width = `${Math.max(1, at(s.p90_ms) - at(s.p10_ms))}%`;
  median.style.left = `${at(s.p50_ms)}%`;
  return el("span", { class: "whiskers", role: "img", title: `p10 ${signed(s.p10_ms)}, median ${signed(s.p50_ms)}, p90 ${signed(s.p90_ms)}`,
    "aria-label": `from ${signed(s.p10_ms)} to ${signed(s.p90_ms)}, median ${signed(s.p50_ms)}` }, range, median);
}

const modes = { empirical: "by what was observed", rank_only: "nothing is refused", absolute: "by what is expected" };

// drawAdmission draws /debug/policy too.
export function drawAdmission(page) {
  const parts = [];
  for (const m of page.models) {
    const a = m.admission;
    parts.push(el("h3", null, el("bdi", null, m.model)), facts([
      ["Mode", a ? `${a.mode}: ${modes[a.mode] ?? ""}` : "all are taken"],
      ["Budget", m.budget_ms > 0 ? milliseconds(m.budget_ms) : "none unless the request says so"],
      ["Observed", a ? (a.samples > 0 ? `p${Math.round(a.percentile * 100)} is ${milliseconds(a.observed_ms)}, of ${count(a.samples)} in ${count(a.window_s)} s` : `nothing in ${count(a.window_s)} s`) : null],
      ["Late", a?.late_for_s > 0 ? `for ${rate(a.late_for_s)} s more, budgets up to ${milliseconds(a.late_budget_ms)} are refused` : null],
      ["Waiting here", m.max_waiting > 0 ? `${count(m.waiting)} of at most ${count(m.max_waiting)}` : "no queue: what cannot be taken is refused at once"],
    ]));
  }
  if (parts.length === 0) parts.push(el("p", { class: "hint" }, "No model is served yet."));
  return parts;
}

// drawDatapath draws /debug/datapath.
export function drawDatapath(page) {
  const all = page.responses.reduce((n, r) => n + r.count, 0);
  const parts = [facts([
    ["Tier", el("span", null, el("b", null, page.tier), page.reason ? ` — ${page.reason}` : "")],
    ["Interfaces", page.interfaces?.join(", ")],
    ["Woken", page.wakeups_per_1000_chunks === null ? null : `${rate(page.wakeups_per_1000_chunks)} times in 1,000 chunks`],
    ["Carried now", page.now ? `${count(page.now.active)} by the kernel, ${count(page.now.armed)} offered, ${count(page.now.paused)} paused, ${count(page.now.stalled)} stalled` : null],
    ["Chunks", `${count(page.kernel_chunks)} in the kernel, ${count(page.copied_chunks)} copied`],
    ["Connections", count(page.connections)],
  ])];
  for (const [name, why] of Object.entries(page.interfaces_failed ?? {})) parts.push(el("p", { class: "problem" }, `${name}: ${why}`));
  if (page.responses.length > 0) {
    parts.push(table("Answers by tier", [{ name: "Answers by" }, { name: "Why not a better tier" }, { name: "Answers", number: true }, { said: "Part of all", number: true }],
      [...page.responses].sort((a, b) => b.count - a.count).map((r) => [r.tier, r.reason || "–", count(r.count), percent(r.count / all)])));
  }
  const reasons = [...Object.entries(page.kernel?.pauses ?? {}).map(([why, n]) => ["paused", why, n]), ...Object.entries(page.kernel?.refusals ?? {}).map(([why, n]) => ["not taken", why, n])]
    .filter(([, , n]) => n > 0).sort((a, b) => b[2] - a[2]);
  if (reasons.length > 0) {
    parts.push(table("What the kernel handed back", [{ name: "Handed back" }, { name: "Why" }, { name: "Times", number: true }], reasons.map(([what, why, n]) => [what, why, count(n)])));
  }
  return parts;
}
