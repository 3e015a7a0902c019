"use strict";
// Niceties: the page is whole without them. Sort a table by a column, hide a curve, filter queries.
document.body.classList.add("live");
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th").forEach((head, column) => {
    const cells = [...body.rows].map((row) => row.cells[column]).filter(Boolean);
    if (cells.some((cell) => cell.classList.contains("number"))) head.classList.add("number");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value;
      const compare = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x !== undefined && y !== undefined) return x - y;
        if (x !== undefined || y !== undefined) return x === undefined ? -1 : 1;
        return a.cells[column].textContent.localeCompare(b.cells[column].textContent);
      };
      body.append(...[...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b))));
    });
  });
  if (table.classList.contains("filtered")) {
    const box = document.createElement("input");
    box.type = "search";
    box.placeholder = "filter queries";
    box.setAttribute("aria-label", "filter queries");
    table.parentElement.before(box);
    box.addEventListener("input", () => {
      const wanted = box.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  }
}
for (const block of document.querySelectorAll(".charts-block")) {
  for (const button of block.querySelectorAll(".legend button")) {
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const line of block.querySelectorAll(`g[data-series="${button.dataset.series}"]`)) {
        line.classList.toggle("off", !shown);
      }
    });
  }
}
