// Drawer shows one thing in full beside the page, and keeps it as new as the page is. It
// is the browser's own modal dialog: Esc closes it, and the focus goes back to where it was.

import { byID, el, write } from "./element.js";

export class Drawer {
  constructor(feed) {
    this.feed = feed;
    this.node = byID("drawer");
    this.title = byID("drawer-title");
    this.body = byID("drawer-body");
    this.source = null;
    byID("drawer-close").addEventListener("click", () => this.node.close());
    this.node.addEventListener("click", (e) => e.target === this.node && this.node.close());
    this.node.addEventListener("close", () => (this.source = null));
  }

  // open shows what draw makes of some pages, and asks for them again with every
  // refresh; once tells of which pages that is not needed any more. otherwise is what is
  // shown instead when the agent does not have them.
  open(title, pages, draw, { once = () => false, otherwise = () => [] } = {}) {
    this.show(title, [el("p", { class: "hint" }, "asking the agent")]);
    this.source = { pages, draw, once, otherwise, last: "" };
    this.refresh();
  }

  // show shows something that stays as it is.
  show(title, parts) {
    this.source = null;
    write(this.title, title);
    this.body.replaceChildren(...parts);
    this.body.scrollTop = 0;
    if (!this.node.open) this.node.showModal();
    this.body.focus();
  }

  async refresh() {
    const source = this.source;
    if (!source || source.done) return;
    let parts;
    try {
      const pages = await Promise.all(source.pages().map((path) => this.feed.json(path)));
      const text = JSON.stringify(pages);
      if (text === source.last) return;
      source.last = text;
      source.done = source.once(...pages);
      parts = source.draw(pages);
    } catch (e) {
      if (e.status === undefined) throw e;
      if (source.last !== "") return; // it stays as it was; the page tells that it is old
      source.done = e.status === 404;
      parts = [el("p", { class: "problem" }, e.message), ...(source.done ? source.otherwise() : [])];
    }
    if (this.source !== source) return;
    const scrolled = this.body.scrollTop, across = [...this.body.querySelectorAll(".scroll")].map((n) => n.scrollLeft);
    const focused = [...this.body.querySelectorAll(".scroll")].indexOf(document.activeElement);
    this.body.replaceChildren(...parts);
    this.body.querySelectorAll(".scroll").forEach((n, i) => {
      n.scrollLeft = across[i] ?? 0;
      if (i === focused) n.focus();
    });
    this.body.scrollTop = scrolled;
  }
}
