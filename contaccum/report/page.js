"use strict";
// Niceties: the page is whole without them. Sort a table by a column, hide a curve, filter queries.
document.body.classList.add("live");
const value = (cell) => (cell.className ? parseFloat(cell.textContent.replace(/[,<]/g, "")) : null);
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th").forEach((head, column) => {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        return value(x) !== null && value(y) !== null ? value(x) - value(y) : x.textContent.localeCompare(y.textContent);
      };
      body.append(...[...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b))));
    });
  });
  if (table.classList.contains("filtered")) {
    const box = document.createElement("input");
    box.type = "search";
    box.placeholder = "filter queries";
    table.parentElement.before(box);
    box.addEventListener("input", () => {
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(box.value.toLowerCase());
    });
  }
}
for (const button of document.querySelectorAll(".legend button")) {
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const series = button.closest(".charts").querySelectorAll(`g[data-series="${button.dataset.series}"]`);
    series.forEach((line) => line.classList.toggle("off", !shown));
  });
}
