// Server-sent events over fetch: EventSource cannot send the credential in a header.

// Calls onData with each event's object until the stream ends or signal aborts it. Throws for an error response.
export async function readEvents(url, options, onData) {
  const response = await fetch(url, { cache: "no-store", ...options });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    const error = new Error(body.error?.message ?? `HTTP ${response.status}`);
    error.status = response.status;
    throw error;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      onData(JSON.parse(event.slice(6)));
    }
  }
}
