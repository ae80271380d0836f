// Shows the nodes, their slots and the workers of the slots.

import { attribute, byId, each, element, text } from "./dom.js";
import { count, rate, size, span } from "./words.js";

const SIGNS = {
  spawning: "◌", loading: "◔", canary: "◑", ready: "●", draining: "◒", backoff: "‖", failed: "✕",
  gone: "†",
};
const WORDS = {
  spawning: "starting", loading: "loading", canary: "trying out", ready: "ready",
  draining: "draining", backoff: "waiting", failed: "failed", gone: "lost",
};
const PHASES = {
  starting: "importing", warming: "reading weights from disk", loading: "loading weights",
  canary: "first tokens", idle: "idle", prefill: "reading prompts", decode: "writing",
  stopping: "stopping",
};

export function showFleet(picture, lives) {
  byId("fleet-empty").hidden = picture.nodes.length > 0;
  each(byId("nodes"), picture.nodes, (node) => node.node, makeNode, (child, node) => {
    const [title, slots] = child.children;
    const said = node.silent ? "has not been heard of lately" : `reaper ${node.pid}`;
    text(title, `${node.node} · ${said}`);
    title.classList.toggle("silent", node.silent);
    each(slots, bySlot(node), (slot) => slot.name, makeSlot, (article, slot) => {
      showSlot(article, slot, lives.of(node.node, slot.name));
    });
  });
}

function makeNode() {
  return element("div", { class: "node" }, element("h3"), element("div"));
}

/** Groups a node's views by slot: a slot has two while its worker is replaced. */
function bySlot(node) {
  const slots = new Map();
  for (const view of node.slots) {
    if (!slots.has(view.slot)) slots.set(view.slot, { name: view.slot, views: [] });
    slots.get(view.slot).views.push(view);
  }
  return [...slots.values()];
}

function makeSlot() {
  const title = element("div", { class: "title" }, element("h3"), element("span", { class: "soft" }));
  const lives = element("ol", { class: "lives", "aria-label": "Workers of this slot so far" });
  return element("article", { class: "slot" }, title, element("div"), lives);
}

function showSlot(article, slot, lives) {
  const [title, workers, past] = article.children;
  text(title.children[0], slot.name);
  text(title.children[1], slot.views[0].model);
  each(workers, slot.views, (view) => view.incarnation, makeWorker, showWorker);
  each(past, lives, (life) => life.number, () => element("li"), (item, life) => {
    const alive = life.ready ? ["●", "now"] : ["◌", "starting"];
    const [sign, what] = { lost: ["†", life.kind], left: ["○", "replaced"], "": alive }[life.end];
    attribute(item, "data-sign", sign);
    attribute(item, "data-end", life.end);
    text(item, `#${life.number} ${what}`);
  });
}

function makeWorker() {
  const meter = element("div", { class: "meter" }, element("progress"), element("span"));
  return element(
    "div", { class: "worker" },
    element("p", { class: "state" }), element("p", { class: "facts" }), meter,
    element("p", { class: "detail" }),
  );
}

function showWorker(row, view) {
  const [state, facts, meter, detail] = row.children;
  text(state, view.trial ? `${WORDS[view.state]}, on trial` : WORDS[view.state]);
  attribute(state, "data-sign", SIGNS[view.state]);
  attribute(state, "data-state", view.state);
  each(facts, factsOf(view), ([name]) => name, () => element("span"), (fact, [, words]) => {
    text(fact, words);
  });
  showMeter(meter, view);
  detail.hidden = !view.detail;
  text(detail, view.detail);
}

function factsOf(view) {
  if (!view.pid) return view.retry_in_s === null ? [] : [["retry", `again in ${span(view.retry_in_s)}`]];
  const facts = [
    ["number", `worker ${view.incarnation}`],
    ["pid", `pid ${view.pid}`],
    ["age", `for ${span(view.age_s)}`],
  ];
  if (view.inferences) facts.push(["answered", count(view.inferences, "answered")]);
  if (view.footprint) facts.push(["memory", size(view.footprint)]);
  return facts;
}

/** Shows the progress of a load, or how full a batch is. */
function showMeter(meter, view) {
  const [bar, words] = meter.children;
  const serves = view.state === "ready" || view.state === "draining";
  const loads = ["spawning", "loading", "canary"].includes(view.state);
  meter.hidden = !serves && !loads;
  if (meter.hidden) return;
  const phase = PHASES[view.phase] ?? view.phase;
  if (serves) {
    fill(bar, view.running, view.rows || 1, `Rows in use by worker ${view.incarnation}`);
    const waiting = view.waiting ? `, ${view.waiting} waiting` : "";
    const speed = view.running || view.tokens_per_s ? ` · ${rate(view.tokens_per_s)} tokens/s` : "";
    text(words, `${phase} · ${view.running} of ${view.rows} rows${waiting}${speed}`);
  } else {
    fill(bar, view.load_done, view.load_total, `Load of worker ${view.incarnation}`);
    const how = view.load_total ? ` · ${size(view.load_done)} of ${size(view.load_total)}` : "";
    text(words, phase + how);
  }
}

/** Sets a progress bar; without a total it is indeterminate. */
function fill(bar, value, total, label) {
  attribute(bar, "aria-label", label);
  if (total) {
    attribute(bar, "max", String(total));
    attribute(bar, "value", String(Math.min(value, total)));
  } else {
    bar.removeAttribute("value");
  }
}
