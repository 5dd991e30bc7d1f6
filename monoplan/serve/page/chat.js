"use strict";
// A small chat. Text of the model becomes DOM nodes, never HTML.
const $ = (id) => document.getElementById(id);
const messages = []; // what the server is told
let running = null; // the AbortController of the answer in the making
let pinned = true; // whether the newest text stays in view

const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed"];
for (const name of FIELDS) {
  const kept = localStorage.getItem("monoplan." + name);
  if (kept !== null) $(name).value = kept;
  $(name).addEventListener("change", () => localStorage.setItem("monoplan." + name, $(name).value));
}
$("key").value = sessionStorage.getItem("monoplan.key") || ""; // gone with the tab
$("key").addEventListener("change", () => { sessionStorage.setItem("monoplan.key", $("key").value); showModel(); });

function headers() {
  const made = { "Content-Type": "application/json" };
  if ($("key").value) made.Authorization = "Bearer " + $("key").value;
  return made;
}

async function showModel() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.status === 401) return openSettings("key");
    $("model").textContent = (await answer.json()).data[0].id;
  } catch (error) { $("model").textContent = "not reachable"; }
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A little Markdown: paragraphs, headings, lists, code, bold, italics.
function inline(parent, text) {
  const mark = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)/g;
  let at = 0;
  for (const found of text.matchAll(mark)) {
    parent.append(text.slice(at, found.index));
    const [whole, code, bold] = found;
    if (code) parent.append(element("code", "", whole.slice(1, -1)));
    else if (bold) parent.append(element("strong", "", whole.slice(2, -2)));
    else parent.append(element("em", "", whole.slice(1, -1)));
    at = found.index + whole.length;
  }
  parent.append(text.slice(at));
}

function render(body, text) {
  const made = document.createDocumentFragment();
  const lines = text.split("\n");
  let paragraph = [], list = null;
  const flush = () => {
    if (paragraph.length) { const p = element("p"); inline(p, paragraph.join("\n")); made.append(p); }
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], fence = /^\s*(```+|~~~+)/.exec(line);
    const item = /^\s*(?:([-*+])|\d+[.)])\s+(.*)/.exec(line), heading = /^#{1,6}\s+(.*)/.exec(line);
    if (!item && line.trim()) list = null;
    if (fence) {
      flush();
      const code = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) code.push(lines[i]);
      const pre = element("pre");
      pre.append(element("code", "", code.join("\n")));
      made.append(pre);
    } else if (heading) {
      flush();
      const h = element("h3"); inline(h, heading[1]); made.append(h);
    } else if (item) {
      flush();
      const tag = item[1] ? "UL" : "OL";
      if (!list || list.tagName !== tag) { list = element(tag); made.append(list); }
      const li = element("li"); inline(li, item[2]); list.append(li);
    } else if (line.trim()) paragraph.push(line);
    else flush();
  }
  flush();
  body.replaceChildren(made);
}

function show(role, text) {
  const box = element("div", "message " + role), body = element("div", "body");
  if (role === "user") body.textContent = text;
  box.append(body);
  if ($("empty")) $("empty").hidden = true;
  $("log").append(box);
  pinned = true;
  scroll();
  return { box, body };
}

function scroll() { if (pinned) $("log").scrollTop = $("log").scrollHeight; }
$("log").addEventListener("scroll", () => {
  const log = $("log");
  pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
});

function request() {
  const system = $("system").value.trim();
  const body = { messages: system ? [{ role: "system", content: system }, ...messages] : [...messages], stream: true };
  body.stream_options = { include_usage: true };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value.trim() !== "" && $(name).checkValidity()) body[name] = Number($(name).value);
  }
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

async function answer() {
  const { box, body } = show("assistant", "");
  const note = element("div", "note"), speed = element("span", "speed");
  note.append(speed);
  box.append(note);
  box.classList.add("running");
  running = new AbortController();
  busy(true);
  const start = performance.now();
  let text = "", first = 0, tokens = 0, usage = null, reason = "", failure = "", waiting = false, over = false;
  const draw = () => {
    waiting = false;
    if (over) return; // a frame that was asked for before the end
    render(body, text);
    const seconds = (performance.now() - first) / 1000;
    if (tokens > 1 && seconds > 0) speed.textContent = `${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
    scroll();
  };
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.finish_reason) reason = choice.finish_reason;
      if (choice.delta.content) {
        first = first || performance.now();
        tokens += 1;
        text += choice.delta.content;
        if (!waiting) { waiting = true; requestAnimationFrame(draw); }
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") failure = error.message || String(error);
    else reason = "stopped";
  }
  over = true;
  const seconds = (performance.now() - first) / 1000;
  render(body, text);
  if (failure) body.append(element("p", "error", failure));
  const facts = [];
  if (first) {
    const count = usage ? usage.completion_tokens : tokens;
    if (count > 1 && seconds > 0) facts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(`${count} tokens`, `first after ${((first - start) / 1000).toFixed(2)} s`);
  }
  if (usage && usage.prompt_tokens_details.cached_tokens) facts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens reused`);
  if (reason === "length") facts.push("cut at the limit of tokens");
  if (reason === "stopped") facts.push("stopped");
  speed.textContent = facts.join(" · ");
  if (text) {
    const copy = element("button", "", "Copy");
    copy.type = "button";
    copy.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(text); copy.textContent = "Copied"; } catch (error) { copy.textContent = "Not allowed"; }
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    note.append(copy);
  }
  const again = element("button", "", "Again");
  again.type = "button";
  again.title = "Answer once more";
  again.addEventListener("click", () => { if (!running) repeat(box); });
  note.append(again);
  box.classList.remove("running");
  if (text) messages.push({ role: "assistant", content: text });
  for (const other of document.querySelectorAll(".message.assistant")) {
    if (other !== box) other.querySelector("[title='Answer once more']")?.remove(); // the last one only
  }
  running = null;
  busy(false);
  scroll();
}

function repeat(box) {
  if (messages.length && messages[messages.length - 1].role === "assistant") messages.pop();
  box.remove();
  answer();
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (!is) $("input").focus();
}

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + "px";
  $("send").disabled = !$("input").value.trim();
}

function openSettings(focus) {
  $("settings").hidden = false;
  $("settings-button").setAttribute("aria-expanded", "true");
  $(focus || "system").focus();
}

$("settings-button").addEventListener("click", () => {
  if ($("settings").hidden) return openSettings();
  $("settings").hidden = true;
  $("settings-button").setAttribute("aria-expanded", "false");
});
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  show("user", text);
  $("input").value = "";
  fit();
  answer();
});
$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
$("stop").addEventListener("click", () => running && running.abort());
$("new").addEventListener("click", () => {
  if (running) running.abort();
  messages.length = 0;
  for (const box of document.querySelectorAll(".message")) box.remove();
  $("empty").hidden = false;
  $("input").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
  if (event.ctrlKey && event.key === ",") { event.preventDefault(); $("settings-button").click(); }
  if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); $("new").click(); }
});
fit();
showModel();
