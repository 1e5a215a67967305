// The page of `kccl serve`: a chat, the time of each token, and the same prompt on another server.

const $ = (id) => document.getElementById(id);
const fields = [...document.querySelectorAll("#settings [name]")];
// Text is escaped: an answer cannot bring its own HTML, and images would ask other machines.
const markdown = window.markdownit({ html: false, linkify: false, breaks: true }).disable("image");
const KEPT = "kccl", CURRENT = "kccl-chat";
const MOST_CHATS = 100;
const FULL = "The browser's storage is full: a reload loses what is new here.";
// Tokens that the gauge looks back on, and alternatives that a token has.
const RECENT = 20, ALTERNATIVES = 8;
// Milliseconds between two looks whether the server is there.
const AWAY_MS = 1000, THERE_MS = 5000;
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "seed", "max_tokens"];

let info = {};
let chat = newChat();
// What ends the answer that runs; null where none does.
let running = null;
// The newest answer's measurements.
let shown = newRun();
let isComparing = false;

// ---- what the browser keeps --------------------------------------------------------------------

function newChat() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] };
}

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    return { settings: found.settings ?? {}, theme: found.theme, chats: Array.isArray(found.chats) ? found.chats : [] };
  } catch {
    return { settings: {}, chats: [] };
  }
}

// Other tabs write too. So only this tab's chat is replaced. Where the storage is full, the oldest
// chats go until the rest fits, but neither the newest nor this tab's.
function keep(change) {
  const found = kept();
  change(found);
  while (!isStored(found)) {
    const oldest = found.chats.findLastIndex((each, index) => index > 0 && each.id !== chat.id);
    if (oldest < 0) {
      // The storage has what it had before.
      sayToo(FULL);
      return;
    }
    found.chats.splice(oldest, 1);
  }
  listChats(found.chats);
}

function isStored(found) {
  try {
    localStorage.setItem(KEPT, JSON.stringify(found));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

function load() {
  const { settings, theme, chats } = kept();
  for (const field of fields) {
    if (!(field.name in settings)) continue;
    if (field.type === "checkbox") field.checked = settings[field.name];
    else field.value = settings[field.name];
  }
  setTheme(theme ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark"));
  // A tab has a chat of its own, which a reload does not change.
  chat = chats.find((each) => each.id === sessionStorage.getItem(CURRENT)) ?? chat;
  showChat();
}

function saveSettings() {
  keep((found) => {
    for (const field of fields) {
      if (field.name !== "key") found.settings[field.name] = field.type === "checkbox" ? field.checked : field.value;
    }
  });
}

function saveChat(saved) {
  keep((found) => {
    found.chats = found.chats.filter((each) => each.id !== saved.id);
    const messages = saved.messages.map(({ role, content }) => ({ role, content }));
    if (messages.length) found.chats = [{ id: saved.id, messages }, ...found.chats].slice(0, MOST_CHATS);
  });
}

function setTheme(name) {
  document.documentElement.className = name;
  draw();
}

// ---- conversations -----------------------------------------------------------------------------

function listChats(chats) {
  $("chats").replaceChildren(...chats.map((each) => {
    const item = document.createElement("li"), open = document.createElement("button"), drop = document.createElement("button");
    open.type = drop.type = "button";
    open.textContent = each.messages[0].content.trim().slice(0, 80) || "…";
    open.className = "open";
    if (each.id === chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => goTo(each));
    drop.textContent = "×";
    drop.className = "drop";
    drop.title = "Forget this conversation";
    drop.setAttribute("aria-label", drop.title);
    drop.addEventListener("click", () => {
      keep((found) => (found.chats = found.chats.filter((other) => other.id !== each.id)));
      if (each.id === chat.id) goTo(newChat());
    });
    item.append(open, drop);
    return item;
  }));
}

function goTo(next) {
  document.body.classList.remove("shows-history");
  $("prompt").focus();
  // The current one stays as it is. An answer that runs belongs to this object alone.
  if (next.id === chat.id) return;
  running?.abort();
  chat = next;
  say("");
  showChat();
}

function showChat() {
  sessionStorage.setItem(CURRENT, chat.id);
  listChats(kept().chats);
  $("messages").replaceChildren();
  chat.messages.forEach(show);
}

function show(message) {
  const item = document.createElement("li");
  item.className = message.role;
  $("messages").append(item);
  fill(item, message);
  return item;
}

function fill(item, message) {
  const list = $("messages"), holds = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  if (message.reasoning) fillReasoning(item, message);
  if (message.role !== "assistant") item.textContent = message.content;
  else if (message.tokens) fillTokens(item, message.tokens);
  else if (info.chats === false) fillText(item, message.content);
  else fillMarkdown(item, message.content);
  if (holds || !running) list.scrollTop = list.scrollHeight;
}

const boxOf = (item) => item.querySelector(":scope > .reasoning");

// What a model thinks before it answers. The box closes once, when the answer begins: whoever reads
// may open and close it at any time.
function fillReasoning(item, { reasoning, content }) {
  let box = boxOf(item);
  if (!box) {
    box = document.createElement("details");
    const head = document.createElement("summary"), text = document.createElement("p");
    box.className = "reasoning";
    box.open = true;
    head.textContent = "Reasoning";
    text.append("");
    box.append(head, text);
    item.prepend(box);
  }
  const said = box.lastElementChild.firstChild;
  said.appendData(reasoning.slice(said.length));
  if (content && !box.dataset.answered) {
    box.dataset.answered = "yes";
    box.open = false;
  }
}

// The box of the reasoning stays: a new one would not know whether it was open.
function clearAnswer(item) {
  const box = boxOf(item);
  for (const each of [...item.childNodes]) if (each !== box) each.remove();
}

function fillMarkdown(item, text) {
  clearAnswer(item);
  item.insertAdjacentHTML("beforeend", markdown.render(text));
}

// What continues a text is no Markdown.
function fillText(item, text) {
  item.classList.add("raw");
  clearAnswer(item);
  item.append(text);
}

// Each token is an element, the paler the likelier, which shows its alternatives.
function fillTokens(item, tokens) {
  item.classList.add("raw");
  item.tabIndex = 0;
  for (const token of tokens.slice(item.querySelectorAll(".token").length)) {
    const part = document.createElement("span");
    part.className = "token";
    part.textContent = token.text;
    part.style.setProperty("--doubt", `${(100 * (1 - Math.exp(token.logprob))).toFixed(0)}%`);
    part.addEventListener("pointerenter", () => showToken(part, token));
    part.addEventListener("pointerleave", hideTip);
    item.append(part);
  }
  item.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const parts = [...item.querySelectorAll(".token")], at = parts.findIndex((each) => each.classList.contains("chosen"));
    const next = Math.min(Math.max(at + step, 0), parts.length - 1);
    parts[at]?.classList.remove("chosen");
    parts[next].classList.add("chosen");
    parts[next].scrollIntoView({ block: "nearest" });
    showToken(parts[next], tokens[next]);
  };
  item.onblur = () => {
    item.querySelector(".chosen")?.classList.remove("chosen");
    hideTip();
  };
}

function showToken(part, token) {
  const head = document.createElement("p"), table = document.createElement("table");
  head.textContent = token.ms === undefined ? "first token" : time(token.ms);
  for (const each of token.top) {
    const row = table.insertRow(), share = Math.exp(each.logprob), bar = document.createElement("i");
    row.className = each.token === token.token ? "taken" : "";
    row.insertCell().textContent = JSON.stringify(each.token);
    bar.style.width = `${(100 * share).toFixed(1)}%`;
    row.insertCell().append(bar);
    row.insertCell().textContent = `${(100 * share).toFixed(1)} %`;
  }
  const { left, bottom, top } = part.getBoundingClientRect();
  showTip([head, table], left, bottom + 6, top - 6);
}

// Shows what is told at a place, or above it where there is no room below.
function showTip(content, x, y, above) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  tip.style.left = `${Math.max(Math.min(x, innerWidth - tip.offsetWidth - 8), 8)}px`;
  tip.style.top = `${y + tip.offsetHeight > innerHeight - 8 ? Math.max(above - tip.offsetHeight, 8) : y}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

function say(text, isWrong = false) {
  $("status").textContent = text;
  $("status").className = isWrong ? "wrong" : "";
}

// Says what is wrong beside what is said already.
function sayToo(text) {
  const said = $("status").textContent;
  if (!said.includes(text)) say(said ? `${said} · ${text}` : text, true);
}

// ---- speed -------------------------------------------------------------------------------------

// Milliseconds of each token of an answer behind its first, their texts, and shares of the bound.
function newRun() {
  return { times: [], texts: [], shares: [], count: 0, firstMs: null, cached: "–", drafts: "–" };
}

const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];

function time(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 0.1 ? `${ms.toFixed(ms < 10 ? 2 : 1)} ms` : `${(1000 * ms).toFixed(1)} µs`;
}

function rateOf(times) {
  if (!times.length) return "–";
  const rate = (1000 * times.length) / times.reduce((a, b) => a + b, 0);
  return rate >= 100 ? Math.round(rate).toLocaleString("en") : rate.toFixed(1);
}

function measure() {
  const { times, shares, count, firstMs, cached, drafts } = shown;
  const share = shares.length ? 100 * median(shares) : null;
  const told = {
    rate: rateOf(times.slice(-RECENT)),
    first: firstMs === null ? "–" : time(firstMs),
    median: times.length ? time(median(times)) : "–",
    slowest: times.length ? time(Math.max(...times)) : "–",
    count: count || "–",
    bound: share !== null ? `${share.toFixed(0)} %` : info.bandwidth === null && count ? "fits caches" : "–",
    cached,
    drafts,
  };
  for (const [id, text] of Object.entries(told)) $(id).textContent = text;
  $("bound").title = info.bandwidth === null ? "The caches hold the weights: memory bounds nothing." : "";
  $("share").hidden = share === null;
  $("share").setAttribute("aria-valuenow", (share ?? 0).toFixed(0));
  $("share").firstElementChild.style.width = `${Math.min(share ?? 0, 100)}%`;
  $("strip").textContent = count ? `${told.rate} tokens/s · first ${told.first} · median ${told.median}` : "";
  draw();
}

function draw() {
  plot($("plot"), shown);
}

// A bar for each token. A single slow one must not press all others to the ground.
function plot(canvas, run, common = 0) {
  const { times } = run, style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name);
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = `11px ${style.getPropertyValue("--mono")}`;
  pen.fillStyle = color("--dim");
  if (times.length < 2) {
    pen.textAlign = "center";
    pen.fillText("the time of each token", width / 2, height / 2);
    return;
  }
  const middle = median(times), slowest = Math.max(...times);
  const most = common || mostOf(times);
  const top = 16, floor = height - 1, step = width / times.length;
  const y = (ms) => floor - (Math.min(ms, most) / most) * (floor - top);
  pen.fillStyle = color("--line");
  pen.fillRect(0, floor, width, 1);
  times.forEach((ms, index) => {
    pen.fillStyle = ms > most ? color("--warm") : color("--accent");
    const at = y(ms);
    pen.fillRect(index * step, at, Math.max(step - (step > 3 ? 1 : 0), 0.6), floor - at);
  });
  pen.strokeStyle = color("--text");
  pen.globalAlpha = 0.55;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(0, y(middle));
  pen.lineTo(width, y(middle));
  pen.stroke();
  pen.globalAlpha = 1;
  pen.fillStyle = color("--dim");
  pen.fillText(`${time(most)}${slowest > most ? " and more" : ""}`, 0, 10);
  pen.textAlign = "right";
  pen.fillText(`${times.length + 1} tokens`, width, 10);
  canvas.onpointermove = (event) => {
    const { left, top: above, bottom } = canvas.getBoundingClientRect();
    const index = Math.min(Math.max(Math.floor((event.clientX - left) / step), 0), times.length - 1);
    const line = document.createElement("p");
    // The first token is no bar.
    line.textContent = `token ${index + 2}: ${time(times[index])}  ${JSON.stringify(run.texts[index])}`;
    showTip([line], event.clientX + 10, bottom + 4, above - 4);
  };
  canvas.onpointerleave = hideTip;
}

const mostOf = (times) => Math.max(Math.min(Math.max(...times), 4 * median(times)), 1e-4);

// ---- the server --------------------------------------------------------------------------------

function setting(name) {
  const field = fields.find((each) => each.name === name);
  return field.type === "checkbox" ? field.checked : field.value.trim();
}

function headers() {
  const key = setting("key");
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// The object that a server answers with.
async function answerOf(url, options = {}) {
  const answer = await fetch(url, { headers: headers(), ...options });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message ?? told?.error ?? `status ${answer.status}`);
}

const ranksOf = ({ ranks, backend }) => `${ranks} rank${ranks > 1 ? "s" : ""} on ${backend}`;

function setState(state, text) {
  $("engine").dataset.state = state;
  $("engine").textContent = text;
}

// Asks what the server is. Returns whether it answers.
async function meet() {
  try {
    const isFirst = !info.model;
    info = await (await answerOf("kccl/info")).json();
    setState("there", `${info.model} · ${ranksOf(info)} · context ${info.context.toLocaleString("en")}`);
    document.title = `${info.model} · kccl`;
    const models = fields.find((each) => each.name === "model"), before = models.value || kept().settings.model;
    models.replaceChildren(...info.models.map((name) => new Option(name, name)));
    models.value = info.models.includes(before) ? before : info.models[0];
    for (const [name, value] of Object.entries(info.sampling)) {
      const field = fields.find((each) => each.name === name);
      if (field) field.placeholder = value;
    }
    $("compare").hidden = !info.compare;
    $("compare").title = `Ask the server at ${info.compare} the same, before this one`;
    // Whether an answer is Markdown is known now.
    if (isFirst) showChat();
    say(info.chats ? "" : "This model has no chat template: it continues your text.");
    return true;
  } catch (error) {
    setState("away", "not connected");
    say(`No answer from the server: ${error.message}`, true);
    return false;
  }
}

// Notices that the server has gone or come back, while nothing runs that would show it.
async function watch() {
  const isAway = $("engine").dataset.state === "away";
  if (!running && document.visibilityState === "visible") {
    if (isAway) await meet();
    else {
      try {
        await answerOf("health");
      } catch (error) {
        setState("away", "not connected");
        say(`The server is away: ${error.message}`, true);
      }
    }
  }
  setTimeout(watch, $("engine").dataset.state === "away" ? AWAY_MS : THERE_MS);
}

// The bias of each id in a text as "42: -100, 7: 5".
function biases(text) {
  return Object.fromEntries(text.split(",").filter((each) => each.trim()).map((each) => {
    const [, id, bias] = each.match(/^\s*(\d+)\s*:\s*([-+]?[\d.]+)\s*$/) ?? [];
    if (id === undefined) throw new Error(`Logit bias has ${JSON.stringify(each.trim())}, must be as in 42: -100`);
    return [id, Number(bias)];
  }));
}

// The path and the body for what is asked of a server.
function request({ model, chats }, messages, extra) {
  const body = { model, stream: true, stream_options: { include_usage: true }, kccl: true };
  for (const name of NUMBERS) if (setting(name) !== "") body[name] = Number(setting(name));
  const stop = fields.find((each) => each.name === "stop").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (setting("logit_bias")) body.logit_bias = biases(setting("logit_bias"));
  Object.assign(body, extra);
  const most = setting("alternatives") ? ALTERNATIVES : 0;
  if (!chats) {
    body.prompt = messages.map((each) => each.content).join("");
    if (most) body.logprobs = most;
    return ["v1/completions", body];
  }
  if (most) Object.assign(body, { logprobs: true, top_logprobs: most });
  const system = setting("system") ? [{ role: "system", content: setting("system") }] : [];
  body.messages = [...system, ...messages.map(({ role, content }) => ({ role, content }))];
  return ["v1/chat/completions", body];
}

// Yields the objects of a stream of events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection has ended in the midst of the answer");
    held += value;
    let end;
    while ((end = held.indexOf("\n")) >= 0) {
      const line = held.slice(0, end).trimEnd();
      held = held.slice(end + 1);
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// The tokens of an event with their alternatives; most have one, which the event's text is.
function alternativesOf({ logprobs: told }, text) {
  if (told?.content) {
    return told.content.map(({ token, logprob, top_logprobs: top }, _, all) => ({ text: all.length > 1 ? token : text, token, logprob, top }));
  }
  return (told?.tokens ?? []).map((token, index, all) => {
    const top = Object.entries(told.top_logprobs[index]).map(([name, logprob]) => ({ token: name, logprob }));
    top.sort((a, b) => b.logprob - a.logprob);
    return { text: all.length > 1 ? token : text, token, logprob: told.token_logprobs[index], top };
  });
}

// Asks a server, and fills a message and its measurements as they come. `update` shows them.
async function read(base, [path, body], signal, message, run, update) {
  let isDrawn = false;
  const later = () => {
    isDrawn = false;
    update();
  };
  const answer = await answerOf(base + path, { method: "POST", body: JSON.stringify(body), signal });
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      const { prompt_tokens: all, prompt_tokens_details: cached } = event.usage;
      run.cached = `${cached.cached_tokens} of ${all}`;
      const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } =
        event.usage.completion_tokens_details ?? {};
      if (accepted + rejected) run.drafts = `${accepted} of ${accepted + rejected}`;
    }
    const choice = event.choices[0];
    if (!choice) continue;
    // Events that belong to no piece of text, as that of the role, have none.
    const piece = choice.text ?? choice.delta.content ?? "";
    message.content += piece;
    if (choice.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
    if (event.kccl) {
      const ms = 1000 * event.kccl.token_s, isFirst = run.count++ === 0;
      if (isFirst) {
        run.firstMs = ms;
        say("");
      } else {
        run.times.push(ms);
        run.texts.push(piece);
        if (event.kccl.bound_share !== null) run.shares.push(event.kccl.bound_share);
      }
      const tokens = alternativesOf(choice, piece).map((each) => ({ ...each, ms: isFirst ? undefined : ms }));
      // A thought's tokens are no part of the answer's text.
      if (piece && tokens.length) (message.tokens ??= []).push(...tokens);
    }
    if (choice.finish_reason === "length") say("The answer has as many tokens as it may have.");
    // At most once a frame, however fast tokens come.
    if (!isDrawn) {
      isDrawn = true;
      requestAnimationFrame(later);
    }
  }
}

async function ask(text) {
  if (!info.model && !(await meet())) {
    $("prompt").value = text;
    return;
  }
  // Another conversation may begin meanwhile.
  const mine = chat;
  mine.messages.push({ role: "user", content: text });
  const asked = show(mine.messages.at(-1)), message = { role: "assistant", content: "" };
  $("send").hidden = true;
  $("stop").hidden = false;
  say("reading the prompt …");
  saveChat(mine);
  running = new AbortController();
  const run = newRun();
  let item, failed = false, update = () => {};
  try {
    if (isComparing) [item, update] = await compare(mine.messages, message, run, running.signal);
    else if (numAnswers() > 1) [item, update] = await several(mine, message, run, running.signal);
    else {
      item = show(message);
      item.classList.add("running");
      update = () => {
        fill(item, message);
        measure();
      };
      shown = run;
      measure();
      await read("", request({ ...info, model: setting("model") }, mine.messages, {}), running.signal, message, run, update);
    }
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else {
      failed = true;
      say(error.message, true);
    }
  }
  running = null;
  update();
  item?.classList.remove("running");
  if (message.content) mine.messages.push(message);
  else if (!item?.classList.contains("pair")) item?.remove();
  if (failed && !message.content) {
    // It can be sent again, and is in no conversation.
    mine.messages.pop();
    asked.remove();
    if (mine === chat && !$("prompt").value) $("prompt").value = text;
  }
  $("send").hidden = false;
  $("stop").hidden = true;
  // A conversation that somebody has just forgotten stays forgotten.
  if (mine === chat || kept().chats.some((each) => each.id === mine.id)) saveChat(mine);
  $("prompt").focus();
}

// ---- several answers beside each other ---------------------------------------------------------

// Adds a side to an item: an answer with its speed.
function addSide(item, side, title) {
  side.element = document.createElement("article");
  side.element.innerHTML = "<h2></h2><p class=gauge><output></output> <span>tokens/s</span></p><canvas></canvas><p class=facts></p><div class=text></div>";
  side.element.querySelector("h2").textContent = title;
  item.append(side.element);
}

function updateSides(sides) {
  const most = Math.max(...sides.map((each) => (each.run.times.length > 1 ? mostOf(each.run.times) : 0)));
  for (const { element, run: { times, firstMs }, run: each, message: said } of sides) {
    element.querySelector("output").textContent = rateOf(times);
    plot(element.querySelector("canvas"), each, most);
    element.querySelector(".facts").textContent = firstMs === null ? "waits" : `first token ${time(firstMs)}` + (times.length ? `, median ${time(median(times))}` : "");
    fill(element.querySelector(".text"), said);
  }
  measure();
  $("messages").scrollTop = $("messages").scrollHeight;
}

const numAnswers = () => Math.min(Math.max(Number(setting("answers")) || 1, 1), 8);

// Asks for several answers at the same time. The conversation goes on with the first one, or with
// another that somebody chooses. With a seed, or one drawn here, each answer has the next one.
async function several(mine, message, run, signal) {
  const item = document.createElement("li"), verdict = document.createElement("p");
  item.className = "pair";
  verdict.className = "verdict";
  $("messages").append(item);
  const first = setting("seed") === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(setting("seed"));
  const here = { ...info, model: setting("model") };
  const sides = Array.from({ length: numAnswers() }, (_, index) => ({
    seed: first + index,
    run: index ? newRun() : run,
    message: index ? { role: "assistant", content: "" } : message,
  }));
  for (const side of sides) addSide(item, side, `seed ${side.seed}`);
  item.append(verdict);
  const update = () => updateSides(sides), asked = [...mine.messages], began = performance.now();
  shown = run;
  const ask = async (side) => {
    side.element.classList.add("running");
    try {
      await read("", request(here, asked, { seed: side.seed }), signal, side.message, side.run, update);
    } finally {
      side.element.classList.remove("running");
      update();
    }
  };
  // All end before an error is told: an answer that goes on has no other reader.
  const ends = await Promise.allSettled(sides.map(ask));
  const seconds = (performance.now() - began) / 1000;
  const count = sides.reduce((sum, each) => sum + each.run.count, 0);
  const isSame = sides.every((each) => each.message.content === message.content);
  verdict.textContent = `${count} tokens in ${seconds.toFixed(2)} s: ${(count / seconds).toFixed(1)} tokens/s together. The server answers ${info.slots} at a time.`;
  if (isSame) verdict.textContent += " All have the same text: they differ at a temperature above 0.";
  chooseAmong(mine, sides, asked);
  if (!sides.some((each) => each.run.count)) item.remove();
  const failed = ends.find((each) => each.status === "rejected");
  if (failed) throw failed.reason;
  return [item, update];
}

// Lets somebody choose with which answer the conversation goes on, until it has gone on.
function chooseAmong(mine, sides, asked) {
  // The conversation has the first side's message, whose content is the chosen one's.
  const [{ message: held }] = sides, said = sides.map(({ message }) => ({ ...message }));
  // A side shows its own answer, also when the first side's message has another one.
  sides.forEach((side, index) => (side.message = said[index]));
  const choose = (chosen) => {
    Object.assign(held, { tokens: undefined, reasoning: undefined }, said[chosen]);
    sides.forEach(({ element }, index) => element.classList.toggle("kept", index === chosen));
  };
  // The first ones may have failed, or all.
  const first = said.findIndex((each) => each.content);
  if (first >= 0) choose(first);
  sides.forEach(({ element }, index) => {
    if (!said[index].content) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "keep";
    button.textContent = "Go on with this one";
    button.addEventListener("click", () => {
      const last = mine.messages.at(-1);
      if (running || (last !== held && last !== asked.at(-1))) return;
      choose(index);
      if (last !== held) mine.messages.push(held);
      saveChat(mine);
    });
    element.append(button);
  });
}

// ---- the same prompt on two servers ------------------------------------------------------------

// Asks the other server, and then this one: at the same time they would share the cores.
async function compare(messages, message, run, signal) {
  const item = document.createElement("li"), verdict = document.createElement("p");
  item.className = "pair";
  verdict.className = "verdict";
  $("messages").append(item);
  const there = await (await answerOf(`${info.compare}/kccl/info`, { signal })).json();
  const here = { ...info, model: setting("model") };
  // Both draw the same random numbers.
  const extra = setting("seed") === "" ? { seed: crypto.getRandomValues(new Uint32Array(1))[0] } : {};
  const sides = [
    { base: `${info.compare}/`, info: there, run: newRun(), message: { role: "assistant", content: "" } },
    { base: "", info: here, run, message },
  ];
  for (const side of sides) addSide(item, side, `${ranksOf(side.info)} · ${side.info.model}`);
  item.append(verdict);
  const update = () => updateSides(sides);
  for (const side of sides) {
    shown = side.run;
    side.element.classList.add("running");
    try {
      await read(side.base, request(side.info, messages, extra), signal, side.message, side.run, update);
    } finally {
      side.element.classList.remove("running");
      update();
    }
  }
  verdict.textContent = verdictOf(...sides);
  return [item, update];
}

function verdictOf(there, here) {
  const said = [];
  if (there.run.times.length && here.run.times.length) {
    const [fast, slow] = [here, there].sort((a, b) => median(a.run.times) - median(b.run.times));
    const ratio = median(slow.run.times) / median(fast.run.times);
    said.push(`${ranksOf(fast.info)}: ${ratio.toFixed(2)} times as fast as ${ranksOf(slow.info)}, by the median token.`);
  }
  const [a, b] = [there.message.content, here.message.content];
  let at = 0;
  while (at < a.length && a[at] === b[at]) at++;
  said.push(a === b ? "Both have the same text." : `Their texts differ from character ${at + 1} on.`);
  said.push("They were asked one after the other.");
  return said.join(" ");
}

// ---- controls ----------------------------------------------------------------------------------

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

function toggle(name) {
  for (const each of ["shows-history", "shows-panel"]) {
    document.body.classList.toggle(each, each === name && !document.body.classList.contains(each));
  }
  draw();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  grow();
  ask(info.chats === false ? text : text.trim());
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.key === "Escape") {
    running?.abort();
    document.body.classList.remove("shows-history", "shows-panel");
  } else if (event.altKey && event.code === "KeyN") goTo(newChat());
  else if (!isTyping && event.key === "/") $("prompt").focus();
  else if (!isTyping && event.key === "?") $("keys").showModal();
  else return;
  if (event.key !== "Escape") event.preventDefault();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => goTo(newChat()));
$("open-history").addEventListener("click", () => toggle("shows-history"));
$("open-panel").addEventListener("click", () => toggle("shows-panel"));
$("show-keys").addEventListener("click", () => $("keys").showModal());
$("compare").addEventListener("click", () => {
  isComparing = !isComparing;
  $("compare").setAttribute("aria-pressed", isComparing);
  say(isComparing ? `Each message goes to ${info.compare} first, and then here.` : "");
});
$("theme").addEventListener("click", () => {
  setTheme(document.documentElement.className === "dark" ? "light" : "dark");
  keep((found) => (found.theme = document.documentElement.className));
});
for (const field of fields) {
  field.addEventListener("change", () => (field.name === "key" ? meet() : saveSettings()));
}
addEventListener("resize", draw);
addEventListener("storage", (event) => event.key === KEPT && listChats(kept().chats));

load();
measure();
meet().then(() => setTimeout(watch, AWAY_MS));
