// Ask a question; each token is shaded by where it came from.

import { byId, element, number, showFigures } from "./dom.js";
import { readEvents } from "./events.js";

export function setUpPlayground(secret) {
  let asking = null;
  byId("stop").addEventListener("click", () => asking?.abort());
  byId("playground").addEventListener("submit", async (event) => {
    event.preventDefault();
    asking?.abort();
    asking = new AbortController();
    const answer = byId("answer");
    answer.replaceChildren();
    answer.setAttribute("aria-busy", "true");
    showFigures(byId("answer-figures"), {});
    byId("stop").disabled = false;
    try {
      await readEvents("../v1/chat/completions", request(secret(), asking.signal), (chunk) => show(answer, chunk));
    } catch (error) {
      if (error.name !== "AbortError") answer.append(element("p", { class: "error" }, error.message));
    }
    answer.setAttribute("aria-busy", "false");
    byId("stop").disabled = true;
  });
}

function request(secret, signal) {
  const body = {
    messages: [{ role: "user", content: byId("question").value }],
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    speculate: byId("speculate").checked,
    stream: true,
    return_sources: true,
  };
  const headers = { Authorization: `Bearer ${secret}`, "Content-Type": "application/json" };
  return { method: "POST", headers, body: JSON.stringify(body), signal };
}

function show(answer, chunk) {
  if (chunk.error) {
    answer.append(element("p", { class: "error" }, chunk.error.message));
    return;
  }
  const choice = chunk.choices[0];
  if (!choice) return; // a chunk that has the usage and no choice
  const text = choice.delta.content;
  if (text) answer.append(element("span", { class: `token ${mostly(chunk.foredraft?.sources)}` }, text));
  if (choice.finish_reason) {
    const figures = chunk.foredraft;
    showFigures(byId("answer-figures"), {
      "Finished by": choice.finish_reason,
      "First token": `${number(1000 * figures.time_to_first_token_s, 0)} ms`,
      "Tokens/s": number(figures.tokens_per_s),
      "From the far drafter": figures.tokens_by_source.draft,
      "From the local drafter": figures.tokens_by_source.local,
      "Target alone": figures.tokens_by_source.plain,
      "Acceptance rate": figures.rounds ? number(figures.acceptance_rate, 3) : "–",
      "Mean acceptance length": figures.rounds ? number(figures.mean_acceptance_length, 2) : "–",
      ...(figures.no_speculation_because ? { "No speculation": figures.no_speculation_because } : {}),
    });
  }
}

// The source of most tokens of a piece: its text cannot be split among them.
function mostly(sources = []) {
  const counts = {};
  for (const source of sources) counts[source] = (counts[source] ?? 0) + 1;
  return Object.keys(counts).sort((a, b) => counts[b] - counts[a])[0] ?? "plain";
}
