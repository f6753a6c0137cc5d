// Keeps the parts of a page that are marked data-live up to date, and helps with forms and the keyboard. Each page works
// without it.
"use strict";

const main = document.getElementById("main");
const page = main.dataset.events;
const EVERY_MS = 2000;
let isFetching = false;
let isWanted = false;
let fetchedAt = performance.now();

async function refresh() {
  if (isFetching || document.hidden) { isWanted = true; return; }
  const left = fetchedAt + EVERY_MS - performance.now();
  isFetching = true;
  isWanted = false;
  try {
    if (left > 0) await new Promise((resolve) => setTimeout(resolve, left));
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (answer.redirected) { location.assign(answer.url); return; }
    if (answer.ok) replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
    document.getElementById("live").hidden = !answer.ok;
  } catch {
    document.getElementById("live").hidden = true;
  }
  fetchedAt = performance.now();
  isFetching = false;
  if (isWanted) refresh();
}

// Puts in the new parts, unless somebody types, has a link in focus or marks text there.
function replace(fresh) {
  const marked = getSelection();
  for (const part of main.querySelectorAll("[data-live]")) {
    const next = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    const isMarked = marked && !marked.isCollapsed && part.contains(marked.anchorNode);
    if (!next || isMarked || next.innerHTML === part.innerHTML) continue;
    const links = [...part.querySelectorAll("a, summary")];
    const at = links.indexOf(document.activeElement);
    const target = at < 0 ? null : links[at].getAttribute("href");
    part.replaceChildren(...next.childNodes);
    if (target !== null) part.querySelector(`a[href="${CSS.escape(target)}"]`)?.focus();
  }
}

if (page) {
  const asked = new URLSearchParams({ page });
  if (page === "group") asked.set("group", decodeURIComponent(location.pathname.split("/")[2]));
  const events = new EventSource(`/api/events?${asked}`);
  let isFirst = true;
  events.addEventListener("snapshot", () => {
    document.getElementById("live").hidden = false;
    if (!isFirst) refresh();
    isFirst = false;
  });
  events.onerror = () => { document.getElementById("live").hidden = true; };
  document.addEventListener("visibilitychange", () => { if (!document.hidden && isWanted) refresh(); });
  addEventListener("pagehide", () => events.close());
}

// The button of a change of many messages can be pressed once their count is typed.
for (const input of document.querySelectorAll("[data-typed]")) {
  const button = input.form.querySelector("button.danger");
  const check = () => { button.disabled = input.value.replaceAll(",", "").trim() !== input.dataset.typed; };
  input.addEventListener("input", check);
  check();
}

// Chooses all rows of a page, where the page has a box for that.
for (const label of document.querySelectorAll("[data-all]")) {
  const all = label.querySelector("input");
  const rows = [...label.closest("form").querySelectorAll('input[name="id"]')];
  const check = () => { all.checked = rows.length > 0 && rows.every((one) => one.checked); };
  label.hidden = false;
  all.addEventListener("change", () => { for (const one of rows) one.checked = all.checked; });
  for (const one of rows) one.addEventListener("change", check);
  check();
}

// "/" goes to the search of the page.
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, select, textarea");
  if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const search = document.querySelector("[data-search]");
  if (search) { event.preventDefault(); search.focus(); search.select(); }
});
