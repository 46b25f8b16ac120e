// An explanation: where a request goes or went, from which candidates, at what cost each,
// and what came of it.

import { el, facts, table } from "./element.js";
import { clock, count, milliseconds, percent, signed, unknown } from "./number.js";

const shownAtFirst = 25; // candidates

// explanation draws one as /debug/decisions?id= and /explain answer it.
export function explanation(d) {
  const parts = [verdict(d), facts([
    ["Time", clock(d.time)],
    ["Request", d.request_id ? el("code", null, d.request_id) : null],
    ["Path", d.path],
    ["Model", d.model],
    ["Policy", d.policy],
    ["Class", d.class],
    ["Prompt", `${count(d.prompt_tokens)} tokens, ${d.exact ? "exact" : `approximate: ${d.why_approximate || d.why}`}`],
    ["Blocks", d.blocks ? `${count(d.blocks)} of ${d.block_size} ${d.exact ? "tokens" : "bytes"}` : null],
    ["Answer at most", d.output_tokens ? `${count(d.output_tokens)} tokens` : null],
    ["Budget", d.budget_ms ? milliseconds(d.budget_ms) : null],
    ["Admission", d.admission],
    ["Waits", d.waits],
  ])];
  if (d.outcome) parts.push(outcome(d));
  parts.push(el("h3", null, `Candidates (${count((d.replicas ?? []).length)})`), candidates(d));
  if (d.shadows?.length) parts.push(el("h3", null, "What the shadows would have done"), shadows(d));
  return parts;
}

function verdict(d) {
  if (d.refused) {
    return el("p", { class: "verdict" }, "Refused: ", el("b", null, d.admission || d.reason), d.retry_after_ms ? `; it may come again after ${milliseconds(d.retry_after_ms)}` : "");
  }
  if (!d.winner) return el("p", { class: "verdict" }, "No replica: ", el("b", null, d.reason || d.admission));
  return el("p", { class: "verdict" }, el("b", { class: "name" }, d.winner), ` — ${d.reason}`, `; first token expected after ${milliseconds(d.predicted_ms)}`);
}

// outcome puts what was predicted beside what came.
function outcome(d) {
  const o = d.outcome;
  const cached = (d.replicas ?? []).find((r) => r.replica === d.winner)?.cached_tokens ?? d.cached_tokens;
  const off = known(o.first_token_ms) && known(d.predicted_ms) ? o.first_token_ms - d.predicted_ms : null;
  const rows = [
    ["First token", exact(d.predicted_ms, milliseconds), exact(o.first_token_ms, milliseconds),
      off === null ? unknown : `${signed(off)} (${off < 0 ? "sooner" : "later"}, ${percent(Math.abs(off) / o.first_token_ms)})`],
    ["Cached tokens", exact(cached, count), exact(o.cached_tokens, count), known(o.cached_tokens) && known(cached) ? plus(o.cached_tokens - cached) : unknown],
    ["Prompt tokens", exact(d.prompt_tokens, count), exact(o.prompt_tokens, count), known(o.prompt_tokens) ? plus(o.prompt_tokens - d.prompt_tokens) : unknown],
  ];
  return el("div", null, el("h3", null, "What came of it"),
    table("Predicted and observed", [{ said: "What" }, { name: "Predicted", number: true }, { name: "Came", number: true }, { name: "Difference", number: true }], rows),
    facts([
      ["Outcome", `${o.outcome}${o.status ? `, status ${o.status}` : ""}`],
      ["Took", milliseconds(o.seconds * 1000)],
      ["Attempts", o.attempts > 1 ? String(o.attempts) : null],
      ["Generated", known(o.output_tokens) ? `${count(o.output_tokens)} tokens` : null],
    ]));
}

// candidates is the table of them, the cheapest first and those that were excluded last.
function candidates(d) {
  const all = [...(d.replicas ?? [])];
  if (all.length === 0) return el("p", { class: "hint" }, "What it was chosen from was not kept.");
  const rank = (r) => (r.replica === d.winner ? 0 : r.excluded ? 2 : 1);
  all.sort((a, b) => rank(a) - rank(b) || (a.cost ?? Infinity) - (b.cost ?? Infinity) || a.slot - b.slot);
  const names = [];
  for (const r of all) for (const t of r.terms ?? []) if (t.value !== 0 && !names.includes(t.name)) names.push(t.name);
  const most = Math.max(...all.map((r) => (r.excluded ? 0 : r.expected_ms ?? 0)), 1e-9);
  const columns = [
    { name: "Replica", class: "name" }, { name: "Cost", number: true }, { name: "Expected" }, { said: "Expected time to first token", number: true },
    { name: "Wait", number: true }, { name: "Prefill", number: true }, { name: "Cached", number: true },
    { name: "In flight", number: true }, { name: "Queued", number: true }, { name: "KV", number: true },
    ...names.map((name) => ({ name: name.replaceAll("_", " "), number: true })),
  ];
  const host = el("div");
  const draw = (n) => {
    const rows = all.slice(0, n).map((r) => {
      const name = el("span", { class: r.excluded ? "out" : r.replica === d.winner ? "won" : null },
        el("bdi", null, r.replica), r.replica === d.winner ? el("span", { class: "tag" }, "chosen") : null, r.excluded ? el("span", { class: "why" }, r.excluded) : null);
      if (r.excluded && !r.terms?.length) return [name, unknown, "", unknown, unknown, unknown, unknown, exact(r.in_flight, count), unknown, unknown, ...names.map(() => unknown)];
      return [name, exact(r.cost, digits), bar(r, most), exact(r.expected_ms, milliseconds), exact(r.wait_ms, milliseconds), exact(r.prefill_ms, milliseconds),
        exact(r.cached_tokens, count), exact(r.in_flight, count), exact(r.queued, count), exact(r.kv, percent),
        ...names.map((t) => exact(r.terms?.find((x) => x.name === t)?.value, digits))];
    });
    host.replaceChildren(table("Candidates", columns, rows));
    if (n < all.length) host.append(el("button", { type: "button", click: () => draw(Infinity) }, `Show ${count(all.length - n)} more`));
  };
  draw(shownAtFirst);
  return el("div", null, host, el("p", { class: "hint" },
    el("span", { class: "swatch wait" }), "waiting ", el("span", { class: "swatch fill" }), "computing what is not cached ", el("span", { class: "swatch rest" }), "the rest. The columns to the right add up to the cost, in the policy's own measure. A number tells all its digits when it is pointed at."));
}

// bar splits the expected time to first token; together the parts are that, whatever a
// correction has made of them.
function bar(r, most) {
  const node = el("span", { class: "split", "aria-hidden": "true" });
  let left = r.expected_ms ?? 0;
  for (const [name, value] of [["wait", r.wait_ms ?? 0], ["fill", r.prefill_ms ?? 0], ["rest", Infinity]]) {
    const part = el("span", { class: name });
    const v = Math.max(0, Math.min(value, left));
    left -= v;
    part.style.width = `${Math.min(100, (v / most) * 100).toFixed(1)}%`;
    node.append(part);
  }
  return node;
}

function shadows(d) {
  return table("Shadows", [{ name: "Policy" }, { name: "Would choose", class: "name" }, { name: "Expected", number: true }, { said: "Same or another" }],
    d.shadows.map((s) => [s.policy, s.winner, exact(s.predicted_ms, milliseconds), s.same ? "the same" : "another"]));
}

const known = (v) => typeof v === "number" && Number.isFinite(v);

const plus = (v) => (v > 0 ? `+${count(v)}` : v < 0 ? `−${count(-v)}` : "0");

// exact shows a number short, and whole when it is pointed at.
function exact(v, format) {
  return el("span", { title: known(v) ? String(v) : null, "data-value": known(v) ? String(v) : null }, format(v));
}

// digits shows a number of no known unit: three that count.
function digits(v) {
  if (!known(v)) return v === null ? "∞" : unknown;
  if (v === 0) return "0";
  const size = Math.abs(v);
  return (size >= 1000 || size < 0.0001 ? v.toExponential(1) : String(Number(v.toPrecision(3)))).replace("-", "−");
}
