// One session's rounds: a waterfall on a shared time axis, and the mean round as a bar that adds up.

import { byId, drawn, element, setText } from "./dom.js";

const SHOWN = 12;
const ROW = 18;
const LEFT = 46;
const RIGHT = 24;

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
  listRounds(rounds.slice(-SHOWN));
  drawLedger();
}

const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const fixed = (value) => `${value.toFixed(2)} ms`;
const endOf = (round) => round.start_ms + round.round_ms;

function drawWaterfall(newest) {
  const svg = byId("waterfall");
  // In pixels, so that the labels stay readable on a phone.
  const width = svg.clientWidth || 1000;
  const start = Math.min(...newest.map((round) => round.start_ms));
  const end = Math.max(...newest.map(endOf));
  const scale = (width - LEFT - RIGHT) / Math.max(1, end - start);
  const height = ROW * newest.length + 24;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const drawnParts = [];
  const ticks = width > 600 ? 6 : 3;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const x = LEFT + ((width - LEFT - RIGHT) * tick) / ticks;
    drawnParts.push(
      drawn("line", { x1: x, x2: x, y1: 0, y2: height - 18 }),
      drawn("text", { x, y: height - 5, "text-anchor": "middle" }, `${Math.round(((end - start) * tick) / ticks)} ms`),
    );
  }
  newest.forEach((round, row) => {
    const group = drawn("g", {}, drawn("text", { x: 4, y: row * ROW + 13 }, `#${round.frame}`));
    let at = round.start_ms;
    round.parts_ms.forEach((part, i) => {
      // Where more is accounted for than there was, the parts are cut off at the round's end; the figures have it.
      const until = Math.min(at + Math.max(0, part), endOf(round));
      if (until > at) {
        const title = drawn("title", {}, `${parts[i]}: ${fixed(part)}`);
        const place = { x: LEFT + (at - start) * scale, y: row * ROW + 3, width: (until - at) * scale, height: ROW - 5 };
        group.append(drawn("rect", { class: `part-${i}`, ...place }, title));
      }
      at = until;
    });
    drawnParts.push(group);
  });
  const overlapping = newest.filter((round, i) => i > 0 && round.start_ms < endOf(newest[i - 1])).length;
  const words = `${newest.length} rounds over ${Math.round(end - start)} milliseconds; ${overlapping} began before the one before had ended.`;
  const title = svg.querySelector("title");
  setText(title, words);
  setText(byId("overlap"), words);
  svg.replaceChildren(title, ...drawnParts);
}

function listRounds(newest) {
  const body = byId("round-figures");
  while (body.children.length > newest.length) body.lastChild.remove();
  newest.forEach((round, i) => {
    const made = () => element("tr", {}, element("th", { scope: "row" }), ...Array.from({ length: 5 }, () => element("td", { class: "number" })));
    const row = body.children[i] ?? body.appendChild(made());
    const texts = [`#${round.frame}`, round.candidates, round.accepted, round.tokens, fixed(sum(round.parts_ms)), fixed(round.round_ms)];
    texts.forEach((text, cell) => setText(row.children[cell], text));
  });
}

function drawLedger() {
  const means = parts.map((_, i) => mean(rounds.map((round) => round.parts_ms[i])));
  const whole = mean(rounds.map((round) => round.round_ms));
  // Durations below zero (more was accounted for than there was) cannot be drawn; the list has them.
  const drawnSum = sum(means.map((value) => Math.max(0, value))) || 1;
  const svg = byId("ledger");
  let x = 0;
  const bars = means.map((value, i) => {
    const width = (1000 * Math.max(0, value)) / drawnSum;
    const bar = drawn("rect", { class: `part-${i}`, x, y: 0, width, height: 40 }, drawn("title", {}, `${parts[i]}: ${fixed(value)}`));
    x += width;
    return bar;
  });
  svg.replaceChildren(svg.querySelector("title"), ...bars);
  const list = byId("parts");
  if (list.children.length !== parts.length + 2) {
    const row = (name, kind) => element("div", { class: kind }, element("dt", {}, name), element("dd"));
    list.replaceChildren(...parts.map((name, i) => row(name, `part-${i}`)), row("", "total"), row("", "total"));
  }
  means.forEach((value, i) => setText(list.children[i].lastChild, fixed(value)));
  const [together, round] = [...list.children].slice(-2);
  setText(together.firstChild, "sum of the parts");
  setText(together.lastChild, fixed(sum(means)));
  setText(round.firstChild, `whole round, of ${rounds.length}`);
  setText(round.lastChild, fixed(whole));
}
