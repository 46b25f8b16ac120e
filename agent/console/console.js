// The console: asks the agent for its pages, tells how old they are, and has the parts of
// the page draw them. Nothing is asked while nobody sees the page.

import { Chart, ChartGroup } from "./chart.js";
import { DecisionList } from "./decisions.js";
import { Drawer } from "./drawer.js";
import { Feed } from "./feed.js";
import { FleetTable } from "./fleet.js";
import { Panel, drawAdmission, drawDatapath, drawShadows } from "./panels.js";
import { explanation } from "./explanation.js";
import { replica, replicaPages } from "./replica.js";
import { byID, el, mark, write } from "./element.js";
import { age, clock, count, milliseconds, percent, rate, unknown } from "./number.js";
import { Overview } from "./overview.js";
import { watchKeys } from "./keys.js";

const pause = 1000; // between two looks, in milliseconds
const longest = 5000; // the same while the agent does not answer
const old = 4000; // from when on what is shown is called old
const slowly = 3; // the panels are asked for at every third look

const feed = new Feed();
const drawer = new Drawer(feed);
const fleet = new FleetTable((row) => drawer.open(row.id, () => replicaPages(row.id), (pages) => replica(fleet.rows.find((r) => r.id === row.id) ?? row, pages, overview.page.time)));
const decisions = new DecisionList(openDecision);
const shadows = new Panel("shadows", drawShadows), admission = new Panel("admission", drawAdmission), datapath = new Panel("datapath", drawDatapath);

const charts = new ChartGroup();
for (const chart of [
  { title: "Time to first token", format: milliseconds, least: 10, lines: [{ name: "p50", look: "main", of: (p) => p.p50 }, { name: "p99", look: "second", of: (p) => p.p99 }] },
  { title: "Requests a second", format: rate, lines: [{ name: "ended", look: "main", of: (p) => p.requests }, { name: "failed", look: "second", of: (p) => p.failed }] },
  { title: "Hit rate", format: percent, least: 1, most: 1, lines: [{ name: "found", look: "main", of: (p) => p.hit }, { name: "expected", look: "second", of: (p) => p.expected }] },
  { title: "Tokens a second", format: rate, least: 10, lines: [{ name: "generated", look: "main", of: (p) => p.output }, { name: "prompts", look: "second", of: (p) => p.prompt }] },
]) new Chart(charts, byID("charts"), chart);

// What is known of the agent. seen is when it was drawn last, on this page's clock, and
// took how long it took until then.
const overview = new Overview();
let seen = null, took = 0, trouble = "", looks = 0, wait = pause, timer = null, looking = false;

async function look() {
  if (document.hidden || looking || token.open) return;
  looking = true;
  clearTimeout(timer);
  const began = performance.now();
  try {
    const [page, made, ready] = await Promise.all([feed.json(overview.path()), feed.json(`debug/decisions?after=${decisions.seq}`), feed.text("readyz", [503])]);
    wait = pause;
    if (overview.take(page)) {
      // Of the one before nothing can be asked for any more, and what has come of this
      // one may be but the end.
      decisions.forget();
      if (drawer.source) drawer.node.close();
      looks = 0;
      wait = 0;
    } else decisions.take(made);
    draw(ready);
    // Only what was drawn is as new as it says.
    seen = performance.now();
    took = seen - began;
    trouble = "";
    if (looks++ % slowly === 0) await panels();
    await drawer.refresh();
  } catch (e) {
    fail(e);
  } finally {
    looking = false;
    drawFresh();
    clearTimeout(timer);
    // A page that takes long to be had and drawn is asked for less often.
    timer = setTimeout(look, Math.max(wait, 2 * (performance.now() - began)));
  }
}

function fail(e) {
  if (e.status === 401) {
    wait = longest;
    askToken();
    return;
  }
  if (e.status === undefined) {
    // The page's own fault, which the browser's console tells more of.
    console.error(e);
  }
  trouble = e.message;
  wait = Math.min(wait * 2, longest);
}

async function panels() {
  await Promise.all([["debug/policy", [shadows, admission]], ["debug/datapath", [datapath]]].map(async ([path, drawn]) => {
    try {
      const page = await feed.json(path);
      for (const panel of drawn) panel.show(page);
    } catch (e) {
      if (e.status === 401 || e.status === undefined) throw e;
      for (const panel of drawn) panel.fail(e.message);
    }
  }));
}

function draw(ready) {
  const page = overview.page;
  mark(byID("main"), "hidden", null);
  drawFacts(page);
  drawReady(ready, page.degraded);
  drawFigures(overview.figures());
  charts.show(overview.points(), overview.span());
  fleet.show(overview.replicas());
}

function drawFacts(page) {
  const up = (new Date(page.time) - new Date(page.started)) / 1000;
  const facts = [location.host, page.version, `up ${age(up)}`, page.tier && `tier ${page.tier}`].filter(Boolean);
  const host = byID("facts");
  while (host.children.length < facts.length) host.append(el("span"));
  facts.forEach((text, i) => write(host.children[i], text));
  write(document.querySelector("title"), `${location.host} · inferrail`);
}

let reasonsOpen = false, readiness = "";

// drawReady shows the word of /readyz, and what is not as it should be.
function drawReady(text, reasons) {
  [readiness] = text.trim().split(": ");
  mark(byID("reasons"), "hidden", reasons.length === 0 ? "" : null);
  const list = byID("reasons-list"), few = 3;
  // Of many the last row is "and 7 more".
  const others = Number(/^and (\d+) more$/.exec(reasons.at(-1) ?? "")?.[1] ?? 1);
  const all = reasons.length - 1 + others;
  write(byID("reasons-title"), all === 1 ? "1 reason" : `${count(all)} reasons`);
  const shown = reasonsOpen ? reasons : reasons.slice(0, few);
  while (list.children.length > shown.length) list.lastElementChild.remove();
  while (list.children.length < shown.length) list.append(el("li"));
  shown.forEach((reason, i) => write(list.children[i], reason));
  const more = byID("reasons-more");
  mark(more, "hidden", reasons.length <= few ? "" : null);
  mark(more, "aria-expanded", reasonsOpen);
  write(more, reasonsOpen ? "Show fewer" : "Show more");
}

byID("reasons-more").addEventListener("click", () => {
  reasonsOpen = !reasonsOpen;
  look();
});

const figureNodes = new Map();

function drawFigures(rows) {
  for (const [name, value, unit] of rows) {
    let node = figureNodes.get(name);
    if (!node) {
      node = { value: el("span"), unit: el("small") };
      figureNodes.set(name, node);
      byID("figures").append(el("div", null, el("dt", null, name), el("dd", null, node.value, " ", node.unit)));
    }
    write(node.value, value);
    write(node.unit, unit ?? "");
  }
}

// drawFresh tells how old what is shown is. It is called each second, whether the agent
// answers or not, so that nothing old is ever taken for new.
function drawFresh() {
  const since = seen === null ? null : performance.now() - seen;
  const stale = since !== null && since > Math.max(old, 5 * took) || since === null && trouble !== "";
  mark(byID("fresh"), "data-state", stale ? "stale" : since === null ? "waiting" : "live");
  write(byID("fresh-word"), stale ? (since === null ? "no answer" : `stale, ${age(since / 1000)} old`) : since === null ? "waiting for the agent" : "live");
  mark(document.body, "data-old", stale ? "" : null);
  const word = readiness === "ok" ? "ready" : readiness;
  mark(byID("ready"), "hidden", readiness === "" ? "" : null);
  mark(byID("ready"), "data-state", stale ? "unknown" : readiness);
  write(byID("ready-word"), stale ? `was ${word}` : word);
  const notice = byID("notice");
  mark(notice, "hidden", stale ? null : "");
  if (stale) {
    write(notice, since === null ? `${sentence(trouble)}. It is asked again every few seconds.`
      : `${sentence(trouble || "the agent does not answer")}. What is shown is of ${clock(Date.now() - since)}; the agent is asked again every few seconds.`);
  }
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1).replace(/\.$/, "");

setInterval(() => !document.hidden && drawFresh(), 1000);
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  drawFresh();
  look();
});

function openDecision(row) {
  drawer.open(`Decision ${row.id}`, () => [`debug/decisions?id=${row.id}`], ([d]) => explanation(d), { once: (d) => Boolean(d.outcome), otherwise: () => explanation(row) });
}

// The form by which a request is explained that nobody has sent.
function openExplain() {
  const models = [...new Set(fleet.rows.flatMap((r) => r.models))];
  const path = el("select", { "aria-label": "Path" }, ...["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"].map((p) => el("option", null, p)));
  const body = el("textarea", { "aria-label": "Body of the request, as JSON", spellcheck: "false" });
  body.value = JSON.stringify({ model: models[0] ?? "MODEL", messages: [{ role: "user", content: "Tell me a story" }] }, null, 2);
  const problem = el("p", { class: "problem", role: "alert" }), answer = el("div");
  const form = el("form", { class: "ask", submit: async (e) => {
    e.preventDefault();
    write(problem, "");
    try {
      answer.replaceChildren(...explanation(await feed.post(`explain?path=${encodeURIComponent(path.value)}`, body.value)));
    } catch (refused) {
      answer.replaceChildren();
      write(problem, sentence(refused.message));
    }
  } }, el("p", { class: "hint" }, "Where it would go now, and why. Nothing is sent to an engine."), body, el("div", { class: "line" }, path, el("button", { type: "submit", class: "main" }, "Explain")), problem);
  drawer.show("Explain a request", [form, answer]);
  body.focus();
}

byID("explain-open").addEventListener("click", openExplain);

// The token.
const token = byID("token");

function askToken() {
  mark(byID("token-forget"), "hidden", "");
  write(byID("token-problem"), feed.token ? "This token was refused." : "");
  if (token.open) return;
  if (drawer.node.open) drawer.node.close();
  token.showModal();
  byID("token-text").focus();
}

byID("token-form").addEventListener("submit", (e) => {
  e.preventDefault();
  const text = byID("token-text").value.trim();
  if (!/^[\x21-\x7e]+$/.test(text)) {
    write(byID("token-problem"), "A token is letters, digits and signs, without blanks.");
    return;
  }
  feed.use(text);
  tryToken();
});

async function tryToken() {
  try {
    await feed.json("debug/overview?replicas=0");
  } catch (e) {
    if (e.status === 401) askToken();
    else write(byID("token-problem"), `${sentence(e.message)}.`);
    byID("token-text").select();
    return;
  }
  byID("token-text").value = "";
  token.close();
  mark(byID("token-forget"), "hidden", null);
  look();
}

token.addEventListener("cancel", (e) => e.preventDefault()); // there is nothing else to see
mark(byID("token-forget"), "hidden", feed.token ? null : "");
byID("token-forget").addEventListener("click", () => {
  feed.use("");
  location.reload();
});

// The theme.
const themes = ["system", "light", "dark"];

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
}

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  write(byID("theme"), `Theme: ${name}`);
  mark(byID("theme"), "aria-label", `Theme: ${name}`);
  try {
    if (name === "system") localStorage.removeItem("inferrail.theme");
    else localStorage.setItem("inferrail.theme", name);
  } catch {
    // It lasts until the page is closed, then.
  }
}

setTheme(document.documentElement.dataset.theme ?? "system");
byID("theme").addEventListener("click", nextTheme);

byID("help-open").addEventListener("click", () => byID("help").showModal());
watchKeys({
  "/": () => byID("fleet-filter").focus(),
  f: () => fleet.grid.host.focus(),
  d: () => decisions.grid.host.focus(),
  p: () => decisions.hold(!decisions.held),
  e: openExplain,
  t: nextTheme,
  "?": () => byID("help").showModal(),
});

look();
