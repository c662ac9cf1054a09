"use strict";

// Show a hint below every table that is wider than the page.
(() => {
  const wide = [...document.querySelectorAll(".wide")];
  wide.forEach((element) => {
    const hint = document.createElement("p");
    hint.className = "hint";
    hint.textContent = "Scroll the table to the right for more columns.";
    element.after(hint);
  });
  const mark = () => wide.forEach((element) => element.classList.toggle("scrolls", element.scrollWidth > element.clientWidth));
  window.addEventListener("resize", mark);
  document.addEventListener("toggle", mark, true);
  mark();
})();

// Show the value of the point under the pointer below the figure.
(() => {
  document.querySelectorAll("figure").forEach((figure) => {
    const show = (event) => {
      const spot = event.target.closest(".spots rect");
      if (!spot) return;
      figure.querySelectorAll(".shown").forEach((rect) => rect.classList.remove("shown"));
      spot.classList.add("shown");
      figure.querySelector(".pointed").textContent = spot.dataset.text;
    };
    figure.addEventListener("pointerover", show);
    figure.addEventListener("click", show);
  });
})();

// Table of cells: sort by a click on a heading, filter by words, open the details that a link points to.
// Without this script the page shows the same content in its original order.
(() => {
  const table = document.querySelector("table.cells");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const tools = document.getElementById("tools");
  const filter = document.getElementById("filter");
  const count = document.getElementById("count");

  function compare(left, right) {
    const numbers = [left, right].map(Number);
    return numbers.some(Number.isNaN) ? left.localeCompare(right) : numbers[0] - numbers[1];
  }

  // Rows without a value stay last in both directions. Equal rows keep their order.
  function sortBy(column) {
    const heading = headings[column];
    const direction = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const sign = direction === "ascending" ? 1 : -1;
    const keyed = rows.map((row) => [row.cells[column].dataset.value ?? "", row]);
    keyed.sort(([left], [right]) =>
      left === "" || right === "" ? (left === "") - (right === "") : sign * compare(left, right)
    );
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", direction);
    body.append(...keyed.map(([, row]) => row));
  }

  function applyFilter() {
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
  filter.addEventListener("input", applyFilter);
  for (const [id, open] of [["open-all", true], ["close-all", false]]) {
    document.getElementById(id).addEventListener("click", () => {
      document.querySelectorAll("details.cell").forEach((details) => (details.open = open));
    });
  }
  window.addEventListener("hashchange", openTarget);
  tools.hidden = false;
  applyFilter();
  openTarget();
})();
