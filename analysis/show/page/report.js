"use strict";

// Tables that are wider than the page say that they can be scrolled.
(() => {
  const wide = [...document.querySelectorAll(".wide")];
  wide.forEach((each) => {
    const hint = document.createElement("p");
    hint.className = "hint";
    hint.textContent = "Scroll the table sideways: more columns stand on the right.";
    each.after(hint);
  });
  const mark = () => wide.forEach((each) => each.classList.toggle("scrolls", each.scrollWidth > each.clientWidth));
  window.addEventListener("resize", mark);
  document.addEventListener("toggle", mark, true);
  mark();
})();

// Below a figure stands what is pointed at or touched.
(() => {
  document.querySelectorAll("figure").forEach((figure) => {
    const show = (event) => {
      const spot = event.target.closest(".spots rect");
      if (!spot) return;
      figure.querySelectorAll(".shown").forEach((each) => each.classList.remove("shown"));
      spot.classList.add("shown");
      figure.querySelector(".pointed").textContent = spot.dataset.say;
    };
    figure.addEventListener("pointerover", show);
    figure.addEventListener("click", show);
  });
})();

// The table of cells: sorted by a click on a heading, narrowed by words, its links open what they point at.
// Without this script the page shows the same, in its first order.
(() => {
  const table = document.querySelector("table.cells");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const tools = document.getElementById("tools");
  const filter = document.getElementById("filter");
  const count = document.getElementById("count");

  function compared(one, two) {
    const both = [one, two].map(Number);
    return both.some(Number.isNaN) ? one.localeCompare(two) : both[0] - both[1];
  }

  // Rows without a value stay last in either direction; equal rows keep the report's order.
  function sortBy(column) {
    const heading = headings[column];
    const direction = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = direction === "ascending" ? 1 : -1;
    const keyed = rows.map((row) => [row.cells[column].dataset.value ?? "", row]);
    keyed.sort(([one], [two]) =>
      one === "" || two === "" ? (one === "") - (two === "") : sign * compared(one, two)
    );
    headings.forEach((each) => each.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", direction);
    body.append(...keyed.map(([, row]) => row));
  }

  function narrow() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    });
    const shown = rows.filter((row) => !row.hidden).length;
    count.textContent = `${shown} of ${rows.length} shown`;
  }

  function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) {
      target.open = true;
      target.scrollIntoView();
    }
  }

  headings.slice(0, -1).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(column));
    heading.append(button);
  });
  filter.addEventListener("input", narrow);
  for (const [id, open] of [["open-all", true], ["close-all", false]]) {
    document.getElementById(id).addEventListener("click", () => {
      document.querySelectorAll("details.cell").forEach((each) => (each.open = open));
    });
  }
  window.addEventListener("hashchange", openTarget);
  tools.hidden = false;
  narrow();
  openTarget();
})();
