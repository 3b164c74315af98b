// One session's rounds: a waterfall on a shared time axis, and the mean round as a bar that adds up.

import { byId, drawn, element, setText } from "./dom.js";

const SHOWN = 12;
const ROW = 18;
const LEFT = 46;

let parts = [];
let rounds = [];
let session = "";

export function watchRounds(id) {
  session = id;
  rounds = [];
  setText(byId("watched"), id ? `session ${id.slice(0, 8)}` : "no session");
  setText(byId("rounds-note"), id ? "Waiting for its first round." : "Choose a session to see where the time of its rounds goes.");
  byId("rounds-note").hidden = false;
  byId("rounds").hidden = true;
}

export function showRounds(update) {
  if (!update || update.session !== session || update.new.length === 0) return;
  parts = update.parts;
  rounds = [...rounds, ...update.new].slice(-200);
  byId("rounds-note").hidden = true;
  byId("rounds").hidden = false;
  drawWaterfall(rounds.slice(-SHOWN));
  drawLedger();
}

function total(round) {
  return round.parts_ms.reduce((sum, part) => sum + part, 0);
}

function drawWaterfall(newest) {
  const svg = byId("waterfall");
  // In pixels, so that the labels stay readable on a phone.
  const width = svg.clientWidth || 1000;
  const start = Math.min(...newest.map((round) => round.start_ms));
  const end = Math.max(...newest.map((round) => round.start_ms + total(round)));
  const scale = (width - LEFT - 10) / Math.max(1, end - start);
  const height = ROW * newest.length + 24;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const drawnParts = [];
  const ticks = width > 600 ? 6 : 3;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const x = LEFT + ((width - LEFT - 10) * tick) / ticks;
    drawnParts.push(
      drawn("line", { x1: x, x2: x, y1: 0, y2: height - 18 }),
      drawn("text", { x, y: height - 5, "text-anchor": tick === ticks ? "end" : "middle" }, `${Math.round(((end - start) * tick) / ticks)} ms`),
    );
  }
  newest.forEach((round, row) => {
    let x = LEFT + (round.start_ms - start) * scale;
    const group = drawn("g", {}, drawn("text", { x: 4, y: row * ROW + 13 }, `#${round.frame}`));
    round.parts_ms.forEach((part, i) => {
      const length = Math.max(0, part * scale);
      if (length > 0) {
        const title = drawn("title", {}, `${parts[i]}: ${part.toFixed(2)} ms`);
        group.append(drawn("rect", { class: `part-${i}`, x, y: row * ROW + 3, width: length, height: ROW - 5 }, title));
      }
      x += part * scale;
    });
    drawnParts.push(group);
  });
  const overlapping = newest.filter((round, i) => i > 0 && round.start_ms < newest[i - 1].start_ms + total(newest[i - 1])).length;
  const words = `${newest.length} rounds over ${Math.round(end - start)} milliseconds; ${overlapping} began before the one before had ended.`;
  const title = svg.querySelector("title");
  setText(title, words);
  svg.replaceChildren(title, ...drawnParts);
}

function drawLedger() {
  const means = parts.map((_, i) => rounds.reduce((sum, round) => sum + round.parts_ms[i], 0) / rounds.length);
  const sum = means.reduce((a, b) => a + b, 0);
  // Durations below zero (more was accounted for than there was) cannot be drawn; the list has them.
  const drawnSum = means.reduce((a, b) => a + Math.max(0, b), 0) || 1;
  const svg = byId("ledger");
  let x = 0;
  const bars = means.map((mean, i) => {
    const width = (1000 * Math.max(0, mean)) / drawnSum;
    const bar = drawn("rect", { class: `part-${i}`, x, y: 0, width, height: 40 }, drawn("title", {}, `${parts[i]}: ${mean.toFixed(2)} ms`));
    x += width;
    return bar;
  });
  svg.replaceChildren(svg.querySelector("title"), ...bars);
  const list = byId("parts");
  if (list.children.length !== parts.length + 1) {
    const rows = parts.map((name, i) => element("div", { class: `part-${i}` }, element("dt", {}, name), element("dd")));
    list.replaceChildren(...rows, element("div", { class: "total" }, element("dt"), element("dd")));
  }
  means.forEach((mean, i) => setText(list.children[i].lastChild, `${mean.toFixed(2)} ms`));
  const last = list.lastChild;
  setText(last.firstChild, `sum, of ${rounds.length} rounds`);
  setText(last.lastChild, `${sum.toFixed(2)} ms`);
}
