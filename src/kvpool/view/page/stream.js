// The stream of the server: events as they come, with the key if one is needed, again after every break.
// Not EventSource: that cannot send a key in a header.

const KEY = "kvpool-key";

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

// What becomes of the connection, in the header of the page.
export function status(text, ok) {
  const pill = document.getElementById("status");
  pill.textContent = text;
  pill.className = `pill ${ok ? "ok" : "bad"}`;
}

// Asks for the key, which stays in this tab.
export function askForKey(message) {
  const dialog = document.getElementById("key-dialog");
  document.getElementById("key-problem").textContent = sessionStorage.getItem(KEY) ? message : ""; // no key was wrong yet
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => {
    sessionStorage.setItem(KEY, document.getElementById("key").value);
    done();
  }, { once: true }));
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// Calls on[name](data) for every event, on.status(text, ok) for what becomes of the connection, on.refused(message) when a
// key is needed (it returns a promise of a new try). Ends when `signal` is aborted.
export async function follow(path, on, signal) {
  for (let tries = 0; !signal.aborted; tries++) {
    try {
      const answer = await fetch(path, { headers: headers(), signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        on.status("needs a key", false);
        await on.refused((await answer.json()).error.message);
        continue;
      }
      if (!answer.ok) throw new Error((await answer.json()).error.message);
      tries = 0;
      on.status("live", true);
      for await (const event of events(answer.body)) on[event.name]?.(event.data);
      throw new Error("the stream ended");
    } catch (problem) {
      if (signal.aborted) return;
      on.status(`no connection: ${problem.message}`, false);
      await pause(Math.min(500 * 2 ** tries, 8000));
    }
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const lines = rest.slice(0, end).split("\n");
      rest = rest.slice(end + 2);
      const field = (name) => lines.find((line) => line.startsWith(name))?.slice(name.length);
      const data = field("data: ");
      if (data !== undefined) yield { name: field("event: ") ?? "message", data: JSON.parse(data) };
    }
  }
}

export function unpack(text, kind) {
  if (Uint8Array.fromBase64) return new kind(Uint8Array.fromBase64(text).buffer); // newer browsers: many times faster
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let place = 0; place < raw.length; place++) bytes[place] = raw.charCodeAt(place);
  return new kind(bytes.buffer);
}
