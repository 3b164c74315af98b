// Small things that every part of the page needs. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Changes a text only where it differs, so that an update costs what has changed.
export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

// Shows pairs of name and value in a <dl>, keeping its elements.
export function showFigures(list, figures) {
  const names = Object.keys(figures);
  while (list.children.length > names.length) list.lastChild.remove();
  names.forEach((name, i) => {
    const row = list.children[i] ?? list.appendChild(element("div", {}, element("dt"), element("dd")));
    setText(row.firstChild, name);
    setText(row.lastChild, figures[name]);
  });
}

// One row for each item, by its id: rows stay where they are and only their cells change.
export class Rows {
  constructor(body, makeRow, showRow) {
    this.body = body;
    this.makeRow = makeRow;
    this.showRow = showRow;
    this.rows = new Map();
  }

  show(items) {
    const seen = new Set();
    let before = null;
    for (const item of items) {
      seen.add(item.id);
      let row = this.rows.get(item.id);
      if (!row) {
        row = this.makeRow(item);
        this.rows.set(item.id, row);
        this.body.insertBefore(row, before ? before.nextSibling : this.body.firstChild);
      }
      this.showRow(row, item);
      before = row;
    }
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        row.remove();
        this.rows.delete(id);
      }
    }
  }
}

export const ms = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(1)} ms`);
export const number = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toFixed(digits));
