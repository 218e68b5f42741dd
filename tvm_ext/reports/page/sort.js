for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : cell.dataset.value === "" ? -1 : Number(cell.dataset.value);
  };
  const sortBy = (column, descending) => {
    const sign = descending ? -1 : 1;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = key(a, column), y = key(b, column);
      return sign * (typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    });
    table.tBodies[0].append(...rows);
    headings.forEach((heading) => heading.removeAttribute("aria-sort"));
    headings[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  };
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const now = heading.getAttribute("aria-sort");
      const numeric = table.tBodies[0].rows[0]?.cells[column].dataset.value !== undefined;
      sortBy(column, now === null ? numeric : now === "ascending");
    });
  });
}
