// Sends requests to the server that this page came from, with an API key if the server asks for one.
// The key is kept in the tab's session storage and nowhere else.

import { byId, text } from "./dom.js";

const STORED = "mayfly-key";

/** An error answer; `status` is 0 where no server was reached. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function request(path, { signal, body } = {}) {
  const key = sessionStorage.getItem(STORED);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const options = { signal, headers, cache: "no-store", credentials: "omit" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const message = answer.error?.message ?? `The server answers with HTTP ${response.status}.`;
  if (response.status === 401) askForKey(key ? message : "This server asks for an API key.");
  throw new Refused(message, response.status);
}

/** Shows the field for a key, with the reason. */
export function askForKey(why) {
  text(byId("key-why"), why);
  if (!byId("key").hidden) return;
  byId("key").hidden = false;
  byId("key-value").focus();
}

/** Calls `then` whenever the user has entered a key. */
export function onKey(then) {
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(STORED, byId("key-value").value.trim());
    byId("key-value").value = "";
    byId("key").hidden = true;
    then();
  });
}
