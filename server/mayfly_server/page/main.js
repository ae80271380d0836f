// Follows the server's status events and shows each status.

import { offerModels, startChat } from "./chat.js";
import { attribute, byId, text } from "./dom.js";
import { showFleet } from "./fleet.js";
import { Lives } from "./lives.js";
import { showLosses } from "./losses.js";
import { askForKey, onKey, request } from "./server.js";
import { events } from "./sse.js";
import { rate } from "./words.js";

const AGAIN_MS = 500;
const AGAIN_MOST_MS = 5000;
const SILENT_MS = 5000; // events come every second
const SAMPLES = 60;

const lives = new Lives();
const rates = [];
let models = "";
let wake = () => {};

async function follow() {
  for (let pause = AGAIN_MS; ; pause = Math.min(2 * pause, AGAIN_MOST_MS)) {
    const began = Date.now();
    try {
      await listen();
      connection("no", "the server is shutting down");
    } catch (error) {
      if (error.status === 401) {
        connection("no", "a key is needed");
        await given();
        pause = AGAIN_MS;
        continue;
      }
      if (error.status === 403) {
        connection("no", "an admin's key shows the workers");
        askForKey("This key may chat; to see the workers, an admin's key is needed.");
        offerModels().catch(() => {});
        await given();
        pause = AGAIN_MS;
        continue;
      }
      connection("no", "not connected; trying again");
    }
    if (Date.now() - began > AGAIN_MOST_MS) pause = AGAIN_MS;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** Shows each status until the server shuts down or the connection is lost. */
async function listen() {
  const silence = new AbortController();
  let timer = 0;
  const expect = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENT_MS);
  };
  try {
    expect();
    const response = await request("mayfly/events", { signal: silence.signal });
    byId("key").hidden = true;
    for await (const { data } of events(response)) {
      expect();
      if (data === undefined) continue;
      const picture = JSON.parse(data);
      show(picture);
      if (picture.leaving) return;
    }
  } finally {
    clearTimeout(timer);
  }
  throw new Error("the connection was lost");
}

const given = () => new Promise((resolve) => { wake = resolve; });

function show(picture) {
  connection("yes", "live");
  const news = lives.hear(picture);
  if (news.length) text(byId("news"), news.join(" "));
  showTotals(
    picture.nodes.flatMap((node) => node.slots.map((view) => ({ ...view, at: `${node.node}/${view.slot}` }))),
  );
  showFleet(picture, lives);
  showLosses(picture);
  const served = [...new Set(picture.nodes.flatMap((node) => node.slots.map((view) => view.model)))];
  if (served.join("\n") !== models) {
    models = served.join("\n");
    offerModels().catch(() => { models = ""; });
  }
}

function showTotals(views) {
  const slots = new Set(views.map((view) => view.at));
  const ready = new Set(views.filter((view) => view.state === "ready").map((view) => view.at));
  const total = (key) => views.reduce((sum, view) => sum + (view[key] ?? 0), 0);
  text(byId("total-ready"), `${ready.size} of ${slots.size}`);
  text(byId("total-running"), String(total("running")));
  text(byId("total-waiting"), String(total("waiting")));
  text(byId("total-rate"), rate(total("tokens_per_s")));
  spark(total("tokens_per_s"));
}

/** One sample a second at most, so that the line is a minute wide. */
function spark(perSecond) {
  const now = Date.now();
  if (rates.length && now - rates.at(-1).at < 950) return;
  rates.push({ at: now, perSecond });
  if (rates.length > SAMPLES) rates.shift();
  const most = Math.max(1, ...rates.map((each) => each.perSecond));
  const points = rates.map((each, n) => {
    const x = 120 - (rates.length - 1 - n) * (120 / (SAMPLES - 1));
    return `${x.toFixed(1)},${(22.5 - (21 * each.perSecond) / most).toFixed(1)}`;
  });
  attribute(byId("spark").firstElementChild, "points", points.join(" "));
}

function connection(live, words) {
  attribute(byId("connection"), "data-live", live);
  text(byId("connection"), words);
}

startChat();
onKey(() => wake());
follow();
