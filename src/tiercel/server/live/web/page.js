// The page: the state that the feed sends, drawn part by part.

import { drawCharts } from "./charts.js";
import "./chat.js";
import { run, state } from "./feed.js";
import { look, offerSpans } from "./past.js";
import { drawRequests } from "./requests.js";
import { drawSections } from "./sections.js";
import { drawSaved, drawTiers } from "./tiers.js";
import { $ } from "./words.js";

function draw() {
  const { stats, server, requests } = state;
  $("all").hidden = false;
  $("model").textContent = server.model;
  $("version").textContent = `tiercel ${server.version}, pages of ${server.page_tokens} tokens`;
  drawSaved(stats);
  drawTiers(state);
  offerSpans(server.spans, drawPast);
  drawPast();
  drawRequests(requests);
}

function drawPast() {
  if (!state.stats) return; // nothing has come yet
  const past = look(state);
  drawCharts(past, state);
  drawSections(past, state);
}

setInterval(drawPast, 5000); // time passes, also when nothing changes
addEventListener("resize", drawPast);
run(draw);
