// Follows each slot's workers through one status after the other.
//
//                 in the status             a loss or an autopsy names it
//   unknown ------------------------> alive ---------------------------> lost (kind)
//                                       |   no longer in the status
//                                       +------------------------------> left (ended as planned)
//
// This module does not touch the document.

const KEPT = 8;

export class Lives {
  #slots = new Map();

  /** Takes a status. Returns sentences about the changes since the last one. */
  hear(picture) {
    const first = this.#slots.size === 0;
    const news = [];
    for (const node of picture.nodes) {
      for (const loss of [...node.autopsies, ...node.losses]) this.#lose(node, loss, news);
      for (const view of node.slots) this.#see(node, view, news);
      this.#part(node);
    }
    return first ? [] : news;
  }

  /** The last workers of a slot, the oldest first: `{number, end, kind, ready}`. */
  of(node, slot) {
    const lives = this.#slots.get(`${node}/${slot}`);
    return lives ? [...lives.values()].sort((a, b) => a.number - b.number).slice(-KEPT) : [];
  }

  #life(node, slot, number) {
    const name = `${node.node}/${slot}`;
    if (!this.#slots.has(name)) this.#slots.set(name, new Map());
    const lives = this.#slots.get(name);
    if (!lives.has(number)) lives.set(number, { number, end: "", kind: "", ready: false });
    return lives.get(number);
  }

  #lose(node, loss, news) {
    const life = this.#life(node, loss.slot, loss.incarnation);
    if (life.end === "lost") return;
    Object.assign(life, { end: "lost", kind: loss.kind });
    const cause = loss.first_cause || loss.kind;
    news.push(`${loss.slot}: worker ${loss.incarnation} was lost, ${loss.kind}: ${cause}.`);
  }

  #see(node, view, news) {
    if (!view.pid) return; // the slot has no worker now
    const life = this.#life(node, view.slot, view.incarnation);
    if (view.state === "ready" && !life.ready) {
      life.ready = true;
      news.push(`${view.slot}: worker ${view.incarnation} is ready.`);
    }
  }

  #part(node) {
    if (node.silent) return;
    const alive = new Set(
      node.slots.filter((view) => view.pid).map((view) => `${view.slot}#${view.incarnation}`),
    );
    for (const [name, lives] of this.#slots) {
      if (!name.startsWith(`${node.node}/`)) continue;
      const slot = name.slice(node.node.length + 1);
      for (const life of lives.values()) {
        if (!life.end && !alive.has(`${slot}#${life.number}`)) life.end = "left";
      }
    }
  }
}

/** Autopsies of all nodes, and losses that have none yet, the latest first. */
export function lastLosses(picture, most = KEPT) {
  const found = [];
  for (const node of picture.nodes) {
    const recorded = new Set(node.autopsies.map((each) => `${each.slot}#${each.incarnation}`));
    const fresh = node.losses.filter((each) => !recorded.has(`${each.slot}#${each.incarnation}`));
    for (const loss of [...node.autopsies, ...fresh]) found.push({ ...loss, node: node.node });
  }
  return found.sort((a, b) => a.age_s - b.age_s).slice(0, most);
}
