// The nodes: a table, and a map on which the distance from the relay is the round trip.

import { byId, drawn, element, ms, Rows, setText } from "./dom.js";

const RINGS_MS = [10, 50, 200];
const EDGE = 135;

const table = new Rows(
  byId("nodes"),
  () => element("tr", {}, element("th", { scope: "row" }), ...Array.from({ length: 5 }, (_, i) => element("td", i > 2 ? { class: "number" } : {}))),
  (row, node) => {
    const texts = [node.name, node.role, node.region || "–", node.model, `${node.sessions} / ${node.capacity}`, ms(node.rtt_ms)];
    texts.forEach((text, i) => setText(row.children[i], i === 0 && node.draining ? `${text} (draining)` : text));
  },
);

// Logarithmic, so that 5 ms and 150 ms can both be seen.
function radius(rttMs) {
  return Math.min(EDGE, 25 + (EDGE - 25) * (Math.log1p(rttMs ?? 0) / Math.log1p(300)));
}

// Nodes of one region stand beside each other; each region has its share of the circle.
function places(nodes) {
  const regions = [...new Set(nodes.map((node) => node.region))].sort();
  return nodes.map((node) => {
    const region = regions.indexOf(node.region);
    const mates = nodes.filter((other) => other.region === node.region);
    const within = (mates.indexOf(node) + 0.5) / mates.length - 0.5;
    const angle = ((region + 0.5 + within * 0.7) / regions.length) * 2 * Math.PI - 1.5 * Math.PI;
    const r = radius(node.rtt_ms);
    return { node, x: r * Math.cos(angle), y: r * Math.sin(angle) };
  });
}

let shown = "";

export function showNodes(nodes) {
  table.show(nodes);
  byId("no-nodes").hidden = nodes.length > 0;
  const key = JSON.stringify(nodes.map((node) => [node.id, node.sessions, Math.round(node.rtt_ms ?? 0)]));
  if (key === shown) return;
  shown = key;
  const map = byId("map");
  const parts = RINGS_MS.flatMap((rtt) => [
    drawn("circle", { class: "ring", r: radius(rtt) }),
    drawn("text", { class: "quiet", y: -radius(rtt) - 2 }, `${rtt} ms`),
  ]);
  for (const { node, x, y } of places(nodes)) {
    const label = node.region ? `${node.name}, ${node.region}` : node.name;
    parts.push(
      drawn("line", { x1: 0, y1: 0, x2: x, y2: y }),
      drawn("circle", { class: node.role, cx: x, cy: y, r: 6 + Math.min(6, node.sessions) }),
      drawn("text", { x, y: y + 20 }, label),
      drawn("text", { class: "quiet", x, y: y + 29 }, ms(node.rtt_ms)),
    );
  }
  parts.push(drawn("circle", { class: "relay", r: 9 }), drawn("text", { y: 20 }, "relay"));
  map.replaceChildren(map.firstChild, ...parts);
}
