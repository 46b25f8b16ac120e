// Elements, made and changed by their text alone. Nothing on the page parses HTML: what
// engines and clients have named is shown letter for letter.

const SVG = "http://www.w3.org/2000/svg";

// el makes an HTML element. Attributes that are functions are listeners; null leaves one
// out. Children are nodes or text.
export function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// svg makes an SVG element likewise.
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const shown = new WeakMap();

// write sets a node's text, and touches the document only when it is another.
export function write(node, text) {
  if (shown.get(node) === text) return;
  shown.set(node, text);
  node.textContent = text;
}

// mark sets an attribute likewise; null removes it.
export function mark(node, name, value) {
  const has = node.getAttribute(name);
  if (value === null || value === undefined) {
    if (has !== null) node.removeAttribute(name);
  } else if (has !== String(value)) node.setAttribute(name, value);
}

export const byID = (id) => document.getElementById(id);

// facts is a list of names and values; those without a value are left out.
export function facts(rows) {
  const list = el("dl", { class: "facts" });
  for (const [name, value] of rows) {
    if (value === null || value === undefined || value === "") continue;
    list.append(el("dt", null, name), el("dd", null, value));
  }
  return list;
}

// table is a small table, with its columns as {name, number} and its rows as lists of
// nodes or text. The name of a column that explains itself is said, and not shown.
export function table(caption, columns, rows) {
  const head = el("tr", null, ...columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : null }, c.name ?? el("span", { class: "unseen" }, c.said))));
  const body = rows.map((row) =>
    el("tr", null, ...row.map((cell, i) => el("td", { class: columns[i].number ? "number" : columns[i].class ?? null }, cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: "small" }, el("caption", { class: "unseen" }, caption), el("thead", null, head), el("tbody", null, ...body)));
}
