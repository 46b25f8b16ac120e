// Chart draws lines over the last minutes. Charts of one group are read together: the
// moment pointed at, or moved to with the arrow keys, is shown in all of them.

import { el, mark, svg, write } from "./element.js";
import { age, unknown } from "./number.js";

const edge = { left: 52, right: 10, top: 8, bottom: 20 };
const height = 132;

export class ChartGroup {
  constructor() {
    this.charts = [];
    this.points = [];
    this.span = 300;
    this.at = null; // seconds ago that are read; null is now
  }

  // show takes the points, the oldest first, each with ago, in seconds.
  show(points, span) {
    this.points = points;
    this.span = span;
    for (const c of this.charts) c.draw();
  }

  read(ago) {
    this.at = ago;
    for (const c of this.charts) c.read();
  }
}

export class Chart {
  // lines are {name, of, look}: of is the value of a point, null where there is none, and
  // look is main or second. least is the least value that the axis reaches to, most what it
  // never passes.
  constructor(group, host, { title, format, lines, least = 1, most = Infinity }) {
    Object.assign(this, { group, format, lines, least, most });
    group.charts.push(this);
    this.title = title;
    this.values = lines.map((l) => ({ name: el("span", { class: `key ${l.look}` }, l.name), value: el("b", null, unknown) }));
    this.when = el("span", { class: "when" });
    this.grid = svg("g", { class: "lines" });
    this.paths = lines.map((l) => svg("path", { class: `line ${l.look}` }));
    this.dots = lines.map((l) => svg("path", { class: `dots ${l.look}` }));
    this.cursor = svg("g", { class: "cursor", visibility: "hidden" }, svg("line"), ...lines.map((l) => svg("circle", { r: 3, class: l.look })));
    this.none = svg("text", { class: "none", "text-anchor": "middle" });
    this.image = svg("svg", { height, role: "slider", tabindex: 0, "aria-roledescription": "chart", "aria-label": title, "aria-valuemax": 0 },
      this.grid, ...this.paths, ...this.dots, this.cursor, this.none);
    host.append(el("figure", { class: "chart" },
      el("figcaption", null, el("h2", null, title), el("span", { class: "values" }, ...this.values.flatMap((v) => [v.name, v.value])), this.when),
      this.image));
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width === this.width) return;
      this.width = width;
      mark(this.image, "viewBox", `0 0 ${width} ${height}`);
      this.draw();
    }).observe(this.image.parentNode);
    this.image.addEventListener("pointermove", (e) => {
      const x = e.clientX - this.image.getBoundingClientRect().left;
      group.read((1 - (x - edge.left) / this.room()) * group.span);
    });
    this.image.addEventListener("pointerleave", () => group.read(null));
    this.image.addEventListener("blur", () => group.read(null));
    this.image.addEventListener("keydown", (e) => this.press(e));
  }

  room() {
    return Math.max(1, this.width - edge.left - edge.right);
  }

  press(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const points = this.group.points, now = this.nearest();
    const to = { ArrowLeft: now < 0 ? points.length - 1 : now - 1, ArrowRight: now < 0 ? points.length - 1 : now + 1, Home: 0, End: points.length - 1 }[e.key];
    if (to === undefined || points.length === 0) return;
    this.group.read(points[Math.min(Math.max(to, 0), points.length - 1)].ago);
    e.preventDefault();
  }

  // nearest is the index of the point that is read, -1 for none.
  nearest() {
    if (this.group.at === null) return -1;
    let best = -1, off = Infinity;
    this.group.points.forEach((p, i) => {
      const d = Math.abs(p.ago - this.group.at);
      if (d < off) [best, off] = [i, d];
    });
    return best;
  }

  draw() {
    const { points, span } = this.group;
    if (this.width === 0) return;
    let top = this.least;
    for (const p of points) for (const l of this.lines) top = Math.max(top, l.of(p) ?? 0);
    top = Math.min(this.most, nice(top));
    const bottom = height - edge.bottom;
    this.x = (ago) => edge.left + (1 - ago / span) * this.room();
    this.y = (v) => bottom - (Math.min(v, top) / top) * (bottom - edge.top);
    const drawn = `${top} ${span} ${this.width}`;
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      const marks = [];
      for (const v of [0, top / 2, top]) {
        const y = Math.round(this.y(v)) + 0.5;
        marks.push(svg("line", { x1: edge.left, x2: this.width - edge.right, y1: y, y2: y }),
          svg("text", { x: edge.left - 6, y: y + 4, "text-anchor": "end" }, this.format(v)));
      }
      const step = span / 60 > 12 ? 300 : this.width < 330 ? 120 : 60;
      for (let ago = 0; ago < span - step / 4; ago += step) {
        marks.push(svg("text", { x: this.x(ago), y: height - 5, "text-anchor": ago === 0 ? "end" : "middle" },
          ago === 0 ? "now" : `${ago / 60} min`));
      }
      this.grid.replaceChildren(...marks);
    }
    this.lines.forEach((l, i) => this.drawLine(l, this.paths[i], this.dots[i]));
    const empty = points.every((p) => this.lines.every((l) => l.of(p) === null || l.of(p) === undefined));
    mark(this.none, "x", edge.left + this.room() / 2);
    mark(this.none, "y", (bottom + edge.top) / 2 + 4);
    write(this.none, empty ? "nothing yet" : "");
    mark(this.image, "aria-valuemin", -span);
    this.read();
  }

  // drawLine draws the line through the values, and the dots that stand alone: what is not
  // known is no line between its neighbours.
  drawLine(line, path, dots) {
    const at = this.group.points.map((p) => {
      const v = line.of(p);
      return v === null || v === undefined ? null : `${this.x(p.ago).toFixed(1)} ${this.y(v).toFixed(1)}`;
    });
    const drawn = [], alone = [];
    at.forEach((place, i) => {
      if (place === null) return;
      const before = at[i - 1] ?? null, behind = at[i + 1] ?? null;
      if (before === null && behind === null) alone.push(`M${place}h0`);
      else drawn.push(`${before === null ? "M" : "L"}${place}`);
    });
    mark(path, "d", drawn.join(""));
    mark(dots, "d", alone.join(""));
  }

  read() {
    const { points } = this.group;
    const at = this.nearest();
    const p = at >= 0 ? points[at] : points.at(-1);
    const text = this.lines.map((l, i) => {
      const v = this.format(p ? l.of(p) : null);
      write(this.values[i].value, v);
      return `${l.name} ${v}`;
    }).join(", ");
    const when = at >= 0 ? `${age(p.ago)} ago` : "";
    write(this.when, when);
    mark(this.image, "aria-valuenow", at >= 0 ? -Math.round(p.ago) : 0);
    mark(this.image, "aria-valuetext", `${when || "now"}: ${text}`);
    mark(this.cursor, "visibility", at >= 0 ? "visible" : "hidden");
    if (at < 0 || !this.x) return;
    const [rule, ...dots] = this.cursor.children;
    const x = this.x(p.ago).toFixed(1);
    for (const [name, v] of [["x1", x], ["x2", x], ["y1", edge.top], ["y2", height - edge.bottom]]) mark(rule, name, v);
    this.lines.forEach((l, i) => {
      const v = l.of(p);
      mark(dots[i], "visibility", v === null || v === undefined ? "hidden" : null);
      mark(dots[i], "cx", x);
      mark(dots[i], "cy", v === null || v === undefined ? 0 : this.y(v).toFixed(1));
    });
  }
}

// nice is the next number up that reads well at the top of an axis.
function nice(v) {
  const unit = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 3, 4, 5, 6, 8, 10].find((n) => n * unit >= v * 0.9999) * unit;
}
