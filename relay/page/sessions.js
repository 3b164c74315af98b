// The sessions: a table whose rows keep their place, and a button on each that opens its rounds.

import { byId, element, number, Rows, setText } from "./dom.js";

let onChoose = () => {};
let watched = "";

const table = new Rows(
  byId("sessions"),
  (session) => {
    const button = element("button", { type: "button", "aria-pressed": "false" }, session.id.slice(0, 8));
    button.setAttribute("aria-label", `Show the rounds of session ${session.id.slice(0, 8)}`);
    button.addEventListener("click", () => onChoose(session.id));
    const cells = Array.from({ length: 7 }, (_, i) => element("td", i > 1 ? { class: "number" } : {}));
    return element("tr", {}, element("td", {}, button), ...cells);
  },
  (row, session) => {
    const total = session.sources.draft + session.sources.local + session.sources.plain;
    const drafted = total ? `${Math.round((100 * (total - session.sources.plain)) / total)} %` : "–";
    const texts = [
      session.verify ?? "–",
      session.draft ?? (session.speculate ? "none" : "not asked for"),
      `${number(session.age_s, 0)} s`,
      session.tokens,
      number(session.tokens_per_s),
      number(session.tokens_per_pass, 2),
      drafted,
    ];
    texts.forEach((text, i) => setText(row.children[i + 1], text));
    const chosen = session.id === watched;
    if (row.classList.contains("watched") !== chosen) {
      row.classList.toggle("watched", chosen);
      row.querySelector("button").setAttribute("aria-pressed", String(chosen));
    }
  },
);

export function onSessionChosen(callback) {
  onChoose = callback;
}

export function showSessions(sessions, chosen) {
  watched = chosen;
  table.show(sessions);
  byId("no-sessions").hidden = sessions.length > 0;
}
