// The chat, over the same API that other clients use. Its conversation ends with the page.

import { byId, element, text } from "./dom.js";
import { Refused, request } from "./server.js";
import { events } from "./sse.js";

let history = [];
let running = null;

export function startChat() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    say();
  });
  byId("say").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("forget").addEventListener("click", () => {
    running?.abort();
    history = [];
    byId("log").replaceChildren();
    byId("forget").disabled = true;
    byId("say").focus();
  });
}

/** Lists the served models to choose from, if there are several. */
export async function offerModels() {
  const answer = await (await request("v1/models")).json();
  const names = answer.data.map((model) => model.id);
  const choice = byId("model");
  const chosen = choice.value;
  choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(chosen)) choice.value = chosen;
  choice.hidden = byId("model-label").hidden = names.length < 2;
}

async function say() {
  const said = byId("say").value.trim();
  if (!said || running) return;
  byId("say").value = "";
  byId("log").querySelector(".empty")?.remove();
  add("you", said);
  running = new AbortController();
  busy(true);
  const shown = add("model", "");
  try {
    await answer(said, shown);
  } catch (error) {
    if (error.name !== "AbortError") add("failed", error.message);
  } finally {
    running = null;
    busy(false);
  }
}

/** Adds the message to the conversation with its answer, or not at all, so that it can be sent again. */
async function answer(said, shown) {
  const messages = [...history, { role: "user", content: said }];
  const signal = running.signal;
  let content = "";
  const remember = () => {
    if (content) history = [...messages, { role: "assistant", content }];
  };
  try {
    if (!byId("model").value) await offerModels();
    const body = { model: byId("model").value, messages, stream: true };
    for await (const event of events(await request("v1/chat/completions", { signal, body }))) {
      if (event.comment !== undefined) {
        text(byId("progress"), waitingFor(event.comment));
        continue;
      }
      if (event.data === "[DONE]") {
        remember();
        return;
      }
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Refused(chunk.error.message, 0);
      text(byId("progress"), "");
      for (const { delta } of chunk.choices) {
        if (delta.reasoning_content) write(shown, "thought", delta.reasoning_content);
        if (delta.content) write(shown, "said", delta.content);
        content += delta.content ?? "";
      }
    }
    throw new Refused("The answer ended early.", 0);
  } catch (error) {
    if (error.name === "AbortError") remember();
    throw error;
  }
}

function waitingFor(comment) {
  return comment.startsWith("waiting") ? "waiting for a worker …" : `reading: ${comment}`;
}

function add(who, words) {
  const line = element("p", { class: who });
  if (words) write(line, "said", words);
  byId("log").append(line);
  return line;
}

function write(line, kind, words) {
  const log = byId("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const last = line.lastElementChild;
  if (last?.className === kind) last.append(words);
  else line.append(element("span", { class: kind }, words));
  if (follows || !line.isConnected) log.scrollTop = log.scrollHeight;
}

function busy(yes) {
  byId("send").disabled = yes;
  byId("stop").hidden = !yes;
  byId("forget").disabled = yes;
  text(byId("progress"), yes ? "waiting for the first token …" : "");
}
