// A conversation with the served model: the tokens of each prompt coloured by where they came from.

import { element } from "/view/panels.js";
import { headers } from "/view/stream.js";

export class Chat {
  constructor(card, model) {
    Object.assign(this, { card, model, messages: [], busy: false });
    this.talk = card.querySelector("#talk");
    this.text = card.querySelector("#chat-text");
    card.querySelector("#chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.#send();
      }
    });
    card.querySelector("#chat-new").addEventListener("click", () => {
      this.messages = [];
      this.talk.replaceChildren();
      this.text.focus();
    });
  }

  offer(possible) {
    this.card.hidden = !possible;
  }

  async #send() {
    const content = this.text.value.trim();
    if (!content || this.busy) return;
    this.#setBusy(true);
    this.text.value = "";
    this.messages.push({ role: "user", content });
    const prompt = element("p", { className: "prompt" });
    const answer = element("p", { className: "answer" });
    const note = element("small", { className: "count" });
    this.talk.append(element("article", {}, prompt, note, answer));
    try {
      const known = await this.#showPrompt(prompt, note);
      this.#correct(prompt, note, known, await this.#showAnswer(answer));
    } catch (problem) {
      answer.textContent = problem.message;
      answer.classList.add("bad");
      this.messages.pop();
    }
    this.#setBusy(false);
  }

  #setBusy(busy) {
    this.busy = busy;
    this.card.setAttribute("aria-busy", String(busy));
    for (const button of this.card.querySelectorAll("button")) button.disabled = busy;
  }

  async #post(path, body) {
    const answer = await fetch(path, {
      method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify({ model: this.model(), ...body }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    return answer;
  }

  // The pieces of the whole prompt, each with the tier that has it just before it is sent.
  async #showPrompt(target, note) {
    const told = await (await this.#post("/view/prompt", { messages: this.messages })).json();
    let place = 0;
    for (const [tier, count] of [...told.tiers, ["none", told.pieces.length]])
      for (let step = 0; step < count && place < told.pieces.length; step++, place++)
        target.append(element("span", { className: `token from-${tier}`, textContent: told.pieces[place], title: tier === "none" ? "computed" : `from the ${tier} cache` }));
    const cached = told.tiers.reduce((sum, [, count]) => sum + count, 0);
    note.textContent = `${cached} of ${told.pieces.length} prompt tokens from the cache`;
    this.talk.scrollTop = this.talk.scrollHeight;
    return cached;
  }

  // What came from the cache beyond what it knew before was loaded from a disk or a remote store meanwhile.
  #correct(prompt, note, known, cached) {
    for (let place = known; place < cached && place < prompt.children.length; place++)
      Object.assign(prompt.children[place], { className: "token from-DISK", title: "loaded from a disk or a remote store" });
    for (let place = cached; place < known; place++) Object.assign(prompt.children[place], { className: "token from-none", title: "computed" });
    note.textContent = `${cached} of ${prompt.children.length} prompt tokens from the cache`;
  }

  // Streams the answer; returns how many tokens of its prompt came from the cache.
  async #showAnswer(target) {
    const answer = await this.#post("/v1/chat/completions", {
      messages: this.messages, stream: true, stream_options: { include_usage: true }, max_completion_tokens: 256,
    });
    let cached = 0;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const part = JSON.parse(line.slice(6));
        if (part.error) throw new Error(part.error.message);
        cached = part.usage?.prompt_tokens_details?.cached_tokens ?? cached;
        text += part.choices[0]?.delta?.content ?? "";
      }
      target.textContent = text;
      this.talk.scrollTop = this.talk.scrollHeight;
    }
    this.messages.push({ role: "assistant", content: text });
    return cached;
  }
}
