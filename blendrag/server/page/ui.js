"use strict";

// Whatever the server says is put in as text. Its own HTML, in which all names are escaped, is read by a parser
// that runs no script. The key is sent as a header only, and forgotten with the tab.

const KEY = "blendrag-key";
const PAGE = 100; // collections
const $ = (id) => document.getElementById(id);
const field = (form) => $(form).querySelector("input");
let next = "";

async function ask(path, { html = false, body } = {}) {
  const headers = { Accept: html ? "text/html" : "application/json" };
  const key = field("key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  if (answer.ok) return html ? answer.text() : answer.json();
  const said = await answer.json().catch(() => ({}));
  const error = new Error(said.error?.message ?? said.error ?? said.detail ?? `the server answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}

function show(error) {
  $("problem").textContent = error ? error.message : "";
}

// Columns by name; a number is set to the right.
function table(id, columns, rows) {
  const shown = (value) => (typeof value === "number" ? value.toLocaleString("en") : String(value ?? ""));
  const cell = (kind, value, number) => {
    const made = document.createElement(kind);
    made.textContent = shown(value);
    if (number) made.className = "number";
    return made;
  };
  const row = (kind, values) => {
    const made = document.createElement("tr");
    made.append(...values.map((value, at) => cell(kind, value, typeof (rows[0] ?? [])[at] === "number")));
    return made;
  };
  $(id).replaceChildren(...(rows.length ? [row("th", columns), ...rows.map((one) => row("td", one))] : []));
}

function put(id, html) {
  $(id).replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
}

const mib = (bytes) => Math.round(bytes / 2 ** 20);

async function model() {
  const found = await ask("model");
  $("model").textContent = `${found.name}, ${found.context_window.toLocaleString("en")} tokens`;
  return found.name;
}

async function stats() {
  const { chunks, counters, eviction } = await ask("stats");
  table("chunks", ["chunks", "with KV", "still to prefill", "evicted", "tokens", "MiB of KV"],
    [[chunks.chunks, chunks.ready, chunks.pending, chunks.evicted, chunks.tokens, mib(chunks.bytes)]]);
  const counted = ["hits", "misses", "promotions", "evictions", "errors", "refused", "damaged"];
  table("tiers", ["tier", "eviction", ...counted],
    Object.entries(counters).map(([tier, of]) =>
      [tier, eviction.policies[tier] ?? "", ...counted.map((name) => of[name] ?? 0)]));
}

async function collections(after = "") {
  const query = new URLSearchParams({ prefix: field("find").value, after, limit: PAGE });
  const found = await ask(`collections?${query}`);
  const rows = found.collections;
  table("collections", ["collection", "documents", "chunks", "with KV", "still to prefill", "evicted", "tokens", "MiB"],
    rows.map((one) =>
      [one.name, one.documents, one.chunks, one.ready, one.pending, one.evicted, one.tokens, mib(one.bytes)]));
  $("count").textContent = `${rows.length.toLocaleString("en")} of ${found.total.toLocaleString("en")}`;
  next = rows.length === PAGE ? rows[PAGE - 1].name : "";
  $("more").hidden = !next;
}

async function prompts() {
  put("prompts", (await ask("prompts", { html: true })) || "none since the server has started");
}

// A key may do less than all of this; that is said where it would stand.
async function part(load, id) {
  try {
    await load();
  } catch (error) {
    if (error.status !== 403) throw error;
    $(id).textContent = error.message;
  }
}

async function load() {
  try {
    sessionStorage.setItem(KEY, field("key").value);
    await model();
    await Promise.all([
      stats(), part(collections, "collections"), part(prompts, "prompts"),
    ]);
    show(null);
  } catch (error) {
    show(error);
  }
}

function request(text, document) {
  let body = { messages: [{ role: "user", content: text }] };
  try {
    const read = JSON.parse(text);
    if (Array.isArray(read)) body = { messages: read };
    else if (read?.messages || read?.prompt || read?.input) body = read;
  } catch { /* then it is a prompt */ }
  if (document) body.blendrag = { ...body.blendrag, documents: [document] };
  return body;
}

async function explain() {
  const [text, document] = [...$("explain").querySelectorAll("textarea")].map((area) => area.value);
  try {
    const body = request(text, document.trim());
    put("explained", await ask("explain", { html: true, body: { ...body, model: await model() } }));
    $("explained").querySelector("details")?.setAttribute("open", "");
    show(null);
  } catch (error) {
    show(error);
  }
}

function on(form, act) {
  $(form).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

on("key", load);
on("find", () => collections().then(() => show(null), show));
on("explain", explain);
$("more").addEventListener("click", () => collections(next).then(() => show(null), show));
field("key").value = sessionStorage.getItem(KEY) ?? "";
load();
