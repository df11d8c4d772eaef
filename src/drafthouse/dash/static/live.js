// Keeps the page current: asks every few seconds, draws only what changed, and says clearly when what is shown is old.
"use strict";
(() => {
  const live = document.getElementById("live");
  const byId = (id) => document.getElementById(id);
  const body = document.body.dataset;
  const state = {
    asOf: Number(body.asOf),
    skew: Date.now() / 1000 - Number(body.now), // this clock against the server's
    oldAfter: Number(body.oldAfter),
    paused: false,
    lost: null, // since when, and why, nothing comes from the server
  };
  const now = () => Date.now() / 1000 - state.skew;

  // What the reader has opened, and what pictures.js has written, stays.
  Idiomorph.defaults.ignoreActiveValue = true;
  Object.assign(Idiomorph.defaults.callbacks, {
    beforeAttributeUpdated: (name, node) => !(name === "open" && node.tagName === "DETAILS"),
    beforeNodeMorphed: (node) => !node.dataset?.keep && node.dataset?.keep !== "",
  });

  document.addEventListener("htmx:configRequest", (event) => {
    if (event.target === live) event.detail.headers["If-None-Match"] = live.dataset.tag;
  });
  document.addEventListener("htmx:beforeRequest", (event) => {
    const asked = event.detail.requestConfig.triggeringEvent?.type;
    if (event.target === live && (document.hidden || state.paused) && asked !== "input") event.preventDefault();
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.target !== live) return;
    const { xhr } = event.detail;
    if (xhr.status === 200 || xhr.status === 304) {
      live.dataset.tag = xhr.getResponseHeader("ETag") ?? "";
      state.asOf = Number(xhr.getResponseHeader("Dash-As-Of"));
      state.skew = Date.now() / 1000 - Number(xhr.getResponseHeader("Dash-Now"));
      state.lost = null;
    } else if (xhr.status === 404) {
      state.lost ??= { since: now(), why: "what this page shows is no longer there" };
    } else {
      const why = xhr.status ? `the page's server answers with error ${xhr.status}` : "the page's server does not answer";
      state.lost ??= { since: now(), why };
    }
    tick();
  });
  document.addEventListener("htmx:afterSwap", tick);

  const write = (element, text) => {
    if (element && element.textContent !== text) element.textContent = text;
  };

  function tick() {
    const at = now();
    for (const time of document.querySelectorAll("time[data-ago]")) {
      write(time, `${Format.age(at - Date.parse(time.dateTime) / 1000)} ago`);
    }
    const shown = Format.clock(state.asOf);
    write(byId("as-of"), shown);
    write(byId("as-of-age"), state.paused ? ", paused" : `, ${Format.age(at - state.asOf)} ago`);
    let why = null;
    if (state.lost && at - state.lost.since > 3) {
      why = `Since ${Format.clock(state.lost.since)} UTC ${state.lost.why}; what you see was true at ${shown} UTC.`;
    } else if (at - state.asOf > state.oldAfter && !state.paused) {
      why = `Nothing was looked at since ${shown} UTC; what you see was true then.`;
    }
    byId("old").hidden = why === null;
    if (why !== null) write(byId("old-why"), why);
  }

  const look = () => htmx.trigger(document.body, "look");
  addEventListener("pageshow", (event) => {
    if (event.persisted) look();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) look();
  });

  const pause = byId("pause");
  pause.hidden = false;
  pause.addEventListener("click", () => {
    state.paused = !state.paused;
    pause.setAttribute("aria-pressed", String(state.paused));
    if (!state.paused) look();
    tick();
  });

  const theme = byId("theme");
  const themes = ["auto", "light", "dark"];
  const chosen = () => document.documentElement.dataset.theme ?? "auto";
  theme.hidden = false;
  write(theme, `Theme: ${chosen()}`);
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(chosen()) + 1) % themes.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    write(theme, `Theme: ${next}`);
    try {
      localStorage.setItem("dash-theme", next);
    } catch {
      // it holds for this page then
    }
  });

  // A filter is part of the address, so that it survives a reload and can be shared.
  document.addEventListener("input", (event) => {
    const form = event.target.closest?.("#filter");
    if (!form) return;
    const wanted = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    history.replaceState(null, "", `${form.getAttribute("action")}${wanted.size ? `?${wanted}` : ""}`);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.id !== "filter") return;
    event.preventDefault();
    htmx.trigger(event.target, "input");
  });

  setInterval(tick, 1000);
  tick();
})();
