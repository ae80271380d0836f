// Shows the last workers that were lost, with the first cause of each loss.

import { byId, each, element, text } from "./dom.js";
import { lastLosses } from "./lives.js";
import { count, span } from "./words.js";

export function showLosses(picture) {
  const losses = lastLosses(picture);
  const several = picture.nodes.length > 1;
  byId("losses-empty").hidden = losses.length > 0;
  each(
    byId("loss-list"), losses, (loss) => `${loss.node}/${loss.slot}#${loss.incarnation}`,
    make, (item, loss) => show(item, loss, several),
  );
}

function make() {
  const head = element(
    "p", { class: "loss-head" },
    element("strong"), element("span"), element("span", { class: "age" }),
  );
  const more = element("details", {}, element("summary", {}, "meaning and advice"),
    element("p"), element("p"), element("p"));
  return element("li", {}, head, element("p", { class: "cause" }), element("p", { class: "soft" }), more);
}

function show(item, loss, several) {
  const [head, cause, done, more] = item.children;
  const slot = several ? `${loss.node}/${loss.slot}` : loss.slot;
  text(head.children[0], `† ${loss.kind}`);
  text(head.children[1], `${slot}, worker ${loss.incarnation}`);
  text(head.children[2], `${span(loss.age_s)} ago`);
  text(cause, loss.first_cause || "no cause is known");
  const recorded = loss.id !== undefined;
  text(done, recorded ? loss.done : "the worker is being ended");
  more.hidden = !recorded;
  if (!recorded) return;
  const [, meaning, advice, facts] = more.children;
  text(meaning, loss.meaning);
  text(advice, loss.advice);
  text(facts, [
    `scope ${loss.scope}`, `pid ${loss.pid}`, `lived ${span(loss.lived_s)}`, `phase ${loss.phase}`,
    count(loss.inferences, "answered"), count(loss.running, "running"), `mayfly faults show ${loss.id}`,
  ].join(" · "));
}
