// Credential, connection, and who shows what.

import { byId, number, setText, showFigures } from "./dom.js";
import { readEvents } from "./events.js";
import { showNodes } from "./nodes.js";
import { setUpPlayground } from "./playground.js";
import { showRounds, watchRounds } from "./rounds.js";
import { onSessionChosen, showSessions } from "./sessions.js";

const KEY = "foredraft-secret";
const RETRY_MS = 2000;
const SILENT_MS = 10000;
let secret = sessionStorage.getItem(KEY) ?? "";
let chosen = "";
let stream = null;

function connection(text, kind) {
  const status = byId("connection");
  setText(status, text);
  status.className = kind;
}

function show(update) {
  connection("live", "live");
  byId("login").hidden = true;
  byId("main").hidden = false;
  byId("leave").hidden = false;
  showFigures(byId("totals"), {
    Sessions: update.num_sessions,
    "Tokens/s": number(update.tokens_per_s),
    "Acceptance rate": number(update.acceptance_rate, 3),
    "Mean acceptance length": number(update.mean_acceptance_length, 2),
    "Answers seen": update.answers,
    Clients: update.num_clients,
    "Frames dropped": Object.values(update.drops).reduce((a, b) => a + b, 0),
  });
  showNodes(update.nodes);
  showSessions(update.sessions, chosen);
  showRounds(update.rounds);
}

function ask(error) {
  secret = "";
  sessionStorage.removeItem(KEY);
  connection("not connected", "");
  byId("main").hidden = true;
  byId("leave").hidden = true;
  byId("login").hidden = false;
  setText(byId("login-error"), error);
  byId("secret").focus();
}

async function follow() {
  stream?.abort();
  const mine = new AbortController();
  stream = mine;
  const url = chosen ? `events?session=${encodeURIComponent(chosen)}` : "events";
  while (stream === mine && secret) {
    // A path may die without a word, as when this machine slept. Updates come every second, so silence is an end too.
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENT_MS);
    const signal = AbortSignal.any([mine.signal, silence.signal]);
    try {
      await readEvents(url, { headers: { Authorization: `Bearer ${secret}` }, signal }, (update) => {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENT_MS);
        show(update);
      });
    } catch (error) {
      if (stream !== mine) return;
      if (error.status === 401 || error.status === 403) {
        ask(error.status === 401 ? "The relay does not know this secret." : "This secret is not for administrators.");
        return;
      }
    }
    clearTimeout(timer);
    if (stream !== mine) return;
    connection("the relay does not answer; trying again", "lost");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  secret = byId("secret").value.trim();
  byId("secret").value = "";
  if (!/^[!-~]+$/.test(secret)) {
    // No header can carry it, which would look like a relay that does not answer.
    ask("A secret is printable ASCII without spaces.");
    return;
  }
  setText(byId("login-error"), "");
  sessionStorage.setItem(KEY, secret);
  follow();
});

byId("leave").addEventListener("click", () => {
  stream?.abort();
  stream = null;
  ask("");
});

onSessionChosen((id) => {
  chosen = chosen === id ? "" : id;
  watchRounds(chosen);
  follow();
});

setUpPlayground(() => secret);
if (secret) follow();
else byId("secret").focus();
