"use strict";
// A table that is wider than the page becomes cards, one for each row: each cell has the name of its column.
function fitTables() {
  for (const table of document.querySelectorAll(".content table.docutils")) {
    table.classList.remove("cards");
    const names = [...table.querySelectorAll("thead th")].map((one) => one.textContent);
    const wrapper = table.parentElement;
    if (wrapper.scrollWidth <= wrapper.clientWidth || !names.length) continue;
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, column) => {
      cell.dataset.name = names[column];
      cell.toggleAttribute("data-empty", !cell.textContent.trim());
    });
    table.classList.add("cards");
  }
}

// What is printed wraps, so that the end of a message is seen; columns stay.
function wrapMessages() {
  for (const text of document.querySelectorAll(".highlight-text pre, .highlight-json pre")) {
    text.classList.toggle("wraps", !/\S {3,}\S/.test(text.textContent));
  }
}

addEventListener("DOMContentLoaded", fitTables);
addEventListener("DOMContentLoaded", wrapMessages);
addEventListener("resize", fitTables);
