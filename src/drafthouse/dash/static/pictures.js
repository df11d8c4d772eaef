// What a picture tells under the pointer or, for the grid of shards, under the keyboard's cursor.
"use strict";
(() => {
  const CELLS = { ArrowRight: 1, ArrowLeft: -1 };
  let told = null; // the cell that is being told, by number
  let asked = 0;
  let over = null; // the chart under the pointer, and where

  // the grid

  const shape = (grid) => {
    const svg = grid.querySelector("svg");
    return { svg, columns: Number(svg.dataset.columns), cells: Number(svg.dataset.cells) };
  };

  const mark = () => {
    const cursor = document.querySelector("#grid .cursor");
    if (!cursor || told === null) return;
    const { columns } = shape(document.getElementById("grid"));
    cursor.setAttribute("x", told % columns);
    cursor.setAttribute("y", Math.floor(told / columns));
  };

  const tell = async (grid, cell) => {
    const { cells } = shape(grid);
    told = Math.min(cells - 1, Math.max(0, cell));
    mark();
    const turn = ++asked;
    await new Promise((done) => setTimeout(done, 120)); // a pointer passes many cells
    if (turn !== asked) return;
    const answer = await fetch(grid.dataset.cell.replace("{n}", told));
    const box = document.getElementById("cell");
    if (!answer.ok || turn !== asked || !box) return;
    // our own server's escaped markup, parsed without running anything
    const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
    box.replaceChildren(...parsed.body.childNodes);
  };

  document.addEventListener("pointermove", (event) => {
    const grid = event.target.closest?.("#grid");
    if (!grid) return;
    const { svg, columns, cells } = shape(grid);
    const box = svg.getBoundingClientRect();
    const side = box.width / columns;
    const cell = Math.floor((event.clientY - box.top) / side) * columns + Math.floor((event.clientX - box.left) / side);
    if (cell !== told && cell >= 0 && cell < cells) tell(grid, cell);
  });

  document.addEventListener("keydown", (event) => {
    if (event.target.id !== "grid") return;
    const grid = event.target;
    const { columns, cells } = shape(grid);
    const at = told ?? -1;
    const next = {
      ...Object.fromEntries(Object.entries(CELLS).map(([key, step]) => [key, at + step])),
      ArrowDown: at + columns,
      ArrowUp: at - columns,
      Home: 0,
      End: cells - 1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (told === null) tell(grid, 0);
    else if (next >= 0 && next < cells) tell(grid, next);
  });

  // the charts

  const readout = () => {
    if (!over || !over.svg.isConnected) return;
    const { svg, clientX } = over;
    const xs = svg.dataset.x.split(" ").map(Number);
    const ys = svg.dataset.y.split(" ");
    const [low, high, left, right] = svg.dataset.span.split(" ").map(Number);
    const box = svg.getBoundingClientRect();
    const inside = ((clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = low + ((inside - left) / (right - left)) * (high - low);
    let nearest = 0;
    xs.forEach((x, place) => {
      if (Math.abs(x - wanted) < Math.abs(xs[nearest] - wanted)) nearest = place;
    });
    const x = left + ((xs[nearest] - low) / (high - low || 1)) * (right - left);
    svg.querySelector(".cross").setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
    const where = svg.dataset.unitX === "time" ? `${Format.clock(xs[nearest])} UTC` : `step ${xs[nearest].toLocaleString("en-US")}`;
    const output = svg.closest("figure").querySelector("[data-readout]");
    output.textContent = `${Format.figure(ys[nearest])} at ${where}`;
  };

  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("svg.chart[data-x]") ?? null;
    if (over && over.svg !== svg) {
      over.svg.querySelector(".cross")?.setAttribute("transform", "translate(-9 0)");
      over.svg.closest("figure")?.querySelector("[data-readout]")?.replaceChildren(...over.before);
      over = null;
    }
    if (!svg) return;
    const output = svg.closest("figure").querySelector("[data-readout]");
    over = { svg, clientX: event.clientX, before: over?.before ?? [...output.cloneNode(true).childNodes] };
    readout();
  });

  // an update puts pictures back as the server drew them
  document.addEventListener("htmx:afterSwap", () => {
    mark();
    if (over?.svg.isConnected) {
      over.before = [...over.svg.closest("figure").querySelector("[data-readout]").cloneNode(true).childNodes];
      readout();
    }
  });
})();
