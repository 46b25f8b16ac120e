// Grid is a table of many rows, of which only those in sight are in the document: what
// an update costs does not depend on how many there are. It is moved in by keys, sorted
// by its columns, and leaves out the columns that there is no room for.
//
// The grid itself has the focus and names the active row, so that a row that scrolls
// away or changes its place takes no focus with it.

import { el, mark, write } from "./element.js";

const spare = 4; // rows drawn above and below those in sight

export class Grid {
  // columns are {key, name, title, width, grow, number, keep, value, draw}: value is what
  // is sorted by, draw fills a cell with a row, keep says which stay when room is short:
  // the lowest go first. key names a row, open is called with one. keepPlace holds what
  // is in sight where it is when rows come in above.
  constructor(host, { label, columns, key, open, height = 30, sort = null, keepPlace = false, empty }) {
    Object.assign(this, { host, columns, key, open, height, sort, keepPlace, empty });
    this.given = []; // as they came
    this.rows = []; // in the order shown
    this.active = null; // the key of a row
    this.pool = []; // {node, cells}
    this.visible = [];
    this.head = el("div", { role: "row", class: "row head", "aria-rowindex": "1" });
    this.body = el("div", { role: "rowgroup", class: "rows" });
    this.none = el("p", { class: "none", role: "status" });
    mark(host, "role", "grid");
    mark(host, "tabindex", "0");
    mark(host, "aria-label", label);
    host.style.setProperty("--row", `${height}px`);
    host.append(el("div", { role: "rowgroup", class: "heads" }, this.head), this.body, this.none);
    this.name = host.id;
    host.addEventListener("keydown", (e) => this.press(e));
    host.addEventListener("scroll", () => this.draw(), { passive: true });
    this.body.addEventListener("click", (e) => this.click(e));
    this.head.addEventListener("click", (e) => this.clickHead(e));
    new ResizeObserver(() => this.fit()).observe(host);
    this.fit();
  }

  // show takes the rows that there are now.
  show(rows, empty = this.empty) {
    this.empty = empty;
    this.given = rows;
    this.order();
    this.draw();
  }

  order() {
    const first = this.keepPlace && this.host.scrollTop > 0 ? Math.floor(this.host.scrollTop / this.height) : -1;
    const anchor = first >= 0 && first < this.rows.length ? this.key(this.rows[first]) : null;
    const by = this.sort && this.columns.find((c) => c.key === this.sort.key);
    if (!by) {
      this.rows = this.given;
    } else {
      // What is not known comes last either way.
      const down = this.sort.down ? -1 : 1;
      const rank = (v) => (v === null || v === undefined || Number.isNaN(v) ? 1 : 0);
      this.rows = this.given
        .map((row, i) => ({ row, i, v: by.value(row) }))
        .sort((a, b) => rank(a.v) - rank(b.v) || (rank(a.v) ? 0 : down * compare(a.v, b.v)) || a.i - b.i)
        .map((x) => x.row);
    }
    mark(this.host, "aria-rowcount", this.rows.length + 1);
    const height = `${this.rows.length * this.height}px`;
    if (this.body.style.height !== height) this.body.style.height = height;
    if (anchor !== null) {
      const now = this.rows.findIndex((row) => this.key(row) === anchor);
      if (now >= 0 && now !== first) this.host.scrollTop += (now - first) * this.height;
    }
  }

  // fit chooses the columns that there is room for.
  fit() {
    let room = this.host.clientWidth - 16;
    if (room <= 0) return;
    const chosen = new Set();
    for (const c of [...this.columns].sort((a, b) => b.keep - a.keep)) {
      if (chosen.size > 1 && c.width > room) break;
      chosen.add(c);
      room -= c.width;
    }
    const visible = this.columns.filter((c) => chosen.has(c));
    if (visible.length === this.visible.length && visible.every((c, i) => c === this.visible[i])) {
      this.draw();
      return;
    }
    this.visible = visible;
    this.host.style.setProperty("--columns", visible.map((c) => (c.grow ? `minmax(${c.width}px, ${c.grow}fr)` : `${c.width}px`)).join(" "));
    mark(this.host, "aria-colcount", visible.length);
    this.drawHead();
    this.body.replaceChildren();
    this.pool = [];
    this.draw();
  }

  drawHead() {
    const tab = this.visible.find((c) => c.key === this.sort?.key) ?? this.visible.find((c) => c.value);
    this.head.replaceChildren(...this.visible.map((c) => {
      const sorted = c.key === this.sort?.key;
      const direction = sorted ? (this.sort.down ? "descending" : "ascending") : c.value ? "none" : null;
      const content = c.value
        ? el("button", { type: "button", "data-column": c.key, tabindex: c === tab ? "0" : "-1", title: c.title ?? null },
          c.name, el("span", { class: "way", "aria-hidden": "true" }))
        : el("span", { title: c.title ?? null }, c.name);
      return el("div", { role: "columnheader", class: c.number ? "number" : null, "aria-sort": direction }, content);
    }));
  }

  clickHead(e) {
    const key = e.target.closest("button")?.dataset.column;
    if (!key) return;
    const column = this.columns.find((c) => c.key === key);
    // Numbers begin with the largest, and a third time is the order of before.
    const first = Boolean(column.number);
    if (this.sort?.key !== key) this.sort = { key, down: first };
    else if (this.sort.down === first) this.sort = { key, down: !first };
    else this.sort = null;
    this.drawHead();
    this.head.querySelector(`[data-column="${key}"]`)?.focus();
    this.order();
    this.draw();
  }

  click(e) {
    const node = e.target.closest("[role=row]");
    const row = node && this.rows[Number(node.dataset.at)];
    if (!row) return;
    this.active = this.key(row);
    this.draw();
    this.open(row);
  }

  at() {
    return this.active === null ? -1 : this.rows.findIndex((row) => this.key(row) === this.active);
  }

  press(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.target.closest(".head")) {
      const buttons = [...this.head.querySelectorAll("button")];
      const i = buttons.indexOf(e.target) + { ArrowLeft: -1, ArrowRight: 1 }[e.key];
      if (buttons[i]) {
        buttons[i].focus();
        e.preventDefault();
      } else if (e.key === "ArrowDown") {
        this.host.focus();
        this.move(0);
        e.preventDefault();
      }
      return;
    }
    const page = Math.max(1, Math.floor((this.host.clientHeight - this.height) / this.height) - 1);
    const now = this.at();
    const to = { ArrowDown: now + 1, ArrowUp: now < 0 ? 0 : now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: this.rows.length - 1 }[e.key];
    if (to !== undefined) this.move(to);
    else if (e.key === "Enter" && now >= 0) this.open(this.rows[now]);
    else return;
    e.preventDefault();
  }

  move(to) {
    if (this.rows.length === 0) return;
    to = Math.min(Math.max(to, 0), this.rows.length - 1);
    this.active = this.key(this.rows[to]);
    const top = to * this.height, room = this.host.clientHeight - this.height; // the head covers one
    if (top < this.host.scrollTop) this.host.scrollTop = top;
    else if (top + this.height > this.host.scrollTop + room) this.host.scrollTop = top + this.height - room;
    this.draw();
  }

  // draw fills the rows that are in sight.
  draw() {
    if (this.visible.length === 0) return;
    // Of fewer rows than there were the browser scrolls back, but later.
    const top = Math.min(this.host.scrollTop, Math.max(0, (this.rows.length + 1) * this.height - this.host.clientHeight));
    const from = Math.max(0, Math.floor(top / this.height) - spare);
    const to = Math.min(this.rows.length, Math.ceil((top + this.host.clientHeight) / this.height) + spare);
    while (this.pool.length < to - from) {
      const cells = this.visible.map((c, i) => el("div", { role: "gridcell", class: c.number ? "cell number" : "cell", "aria-colindex": i + 1 }));
      const node = el("div", { role: "row", class: "row", id: `${this.name}-${this.pool.length}` }, ...cells);
      this.pool.push({ node, cells });
      this.body.append(node);
    }
    let active = null;
    this.pool.forEach((place, i) => {
      const at = from + i;
      if (at >= to) {
        mark(place.node, "hidden", "");
        return;
      }
      const row = this.rows[at];
      mark(place.node, "hidden", null);
      mark(place.node, "data-at", at);
      mark(place.node, "aria-rowindex", at + 2);
      const y = `translateY(${at * this.height}px)`;
      if (place.node.style.transform !== y) place.node.style.transform = y;
      const chosen = this.active !== null && this.key(row) === this.active;
      mark(place.node, "aria-selected", chosen ? "true" : null);
      if (chosen) active = place.node.id;
      this.visible.forEach((c, j) => c.draw(place.cells[j], row));
    });
    mark(this.host, "aria-activedescendant", active);
    mark(this.none, "hidden", this.rows.length > 0 ? "" : null);
    if (this.rows.length === 0) write(this.none, this.empty ?? "");
  }
}

function compare(a, b) {
  return typeof a === "string" ? collator.compare(a, b) : a - b;
}

// Names that end in numbers are in the order of these.
const collator = new Intl.Collator("en", { numeric: true });
