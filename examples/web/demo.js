// An exported model in a page: loads chat.wasm, weights.bin and tokenizer.bin, and writes what the model says.
"use strict";

const out = document.getElementById("out");
const status_ = document.getElementById("status");
let wasm = null;
const bytes = () => new Uint8Array(wasm.memory.buffer);

// What WASI's C library asks of its host: a place for error messages, a clock, and nothing else.
function host() {
  let said = "";
  const known = {
    fd_write(fd, vectors, count, written) {
      const view = new DataView(wasm.memory.buffer);
      let total = 0;
      for (let i = 0; i < count; ++i) {
        const at = view.getUint32(vectors + 8 * i, true), n = view.getUint32(vectors + 8 * i + 4, true);
        said += new TextDecoder().decode(bytes().slice(at, at + n));
        total += n;
      }
      view.setUint32(written, total, true);
      return 0;
    },
    clock_time_get(id, precision, at) {
      new DataView(wasm.memory.buffer).setBigUint64(at, BigInt(Math.round(performance.now() * 1e6)), true);
      return 0;
    },
    proc_exit(code) { throw new Error(said.trim() || `exit ${code}`); },
    sched_yield: () => 0,
    fd_prestat_get: () => 8,  // there are no folders
  };
  return new Proxy(known, { get: (all, name) => all[name] ?? (() => 52) });  // 52: not supported
}

function text(at) {
  const memory = bytes();
  let end = at;
  while (memory[end]) ++end;
  return new TextDecoder().decode(memory.slice(at, end));
}

function put(data) {
  const at = wasm.web_memory(data.length);
  if (!at) throw new Error("there is no memory for the model");
  bytes().set(data, at);
  return [at, data.length];
}

async function load() {
  const fetched = async (name) => {
    const answer = await fetch(name);
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
    return new Uint8Array(await answer.arrayBuffer());
  };
  const imports = { wasi_snapshot_preview1: host() };
  const made = await WebAssembly.instantiate(await fetched("chat.wasm"), imports);
  wasm = made.instance.exports;
  wasm._initialize?.();
  const problem = wasm.web_open(...put(await fetched("weights.bin")), ...put(await fetched("tokenizer.bin")));
  if (problem) throw new Error(text(problem));
}

async function run(prompt, { message = false, most = 64, temperature = 0, seed = 0 } = {}) {
  const ids = [], begin = performance.now();
  let first = 0;
  out.textContent = message ? "" : prompt;
  wasm.web_begin(...put(new TextEncoder().encode(prompt)), message ? 1 : 0, most, temperature, seed);
  for (let token; (token = wasm.web_next()) >= 0;) {
    ids.push(token);
    first ||= performance.now();
    out.textContent += text(wasm.web_text());
    await new Promise((shown) => setTimeout(shown));
  }
  out.textContent += text(wasm.web_text());
  const seconds = (performance.now() - first) / 1000;
  status_.textContent = `${ids.length} tokens, the first after ${Math.round(first - begin)} ms, then `
    + `${((ids.length - 1) / Math.max(seconds, 1e-9)).toFixed(1)} a second`;
  return ids;
}

window.ready = load().then(() => { status_.textContent = "ready"; }, (error) => {
  status_.textContent = error.message;
  throw error;
});
document.getElementById("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const message = document.getElementById("message").checked;
  window.ready.then(() => run(document.getElementById("prompt").value, { message, most: 256 })).catch((error) => {
    status_.textContent = error.message;
  });
});
window.run = run;
