(() => {
  "use strict";
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // Columns sort by their headings: best first, then the other way round, then as the strategies were named.
  const table = document.querySelector("table.board");
  const rows = table ? all("tbody.rules tr", table) : [];
  const heads = table ? all("th[data-better]", table) : [];
  const value = (row, place) => parseFloat(row.cells[place].dataset.value);
  const sort = (head) => {
    const best = head.dataset.better === "low" ? "ascending" : "descending";
    const other = best === "ascending" ? "descending" : "ascending";
    const order = { none: best, [best]: other, [other]: "none" }[head.ariaSort || "none"];
    heads.forEach((h) => h.setAttribute("aria-sort", h === head ? order : "none"));
    const sign = order === "ascending" ? 1 : -1;
    const sorted = [...rows];
    if (order !== "none") {
      sorted.sort((a, b) => {
        const [x, y] = [value(a, head.cellIndex), value(b, head.cellIndex)];
        return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
      });
    }
    table.querySelector("tbody.rules").append(...sorted);
  };
  heads.forEach((head) => {
    const button = document.createElement("button");
    const name = head.querySelector(".name");
    button.type = "button";
    name.replaceWith(button);
    button.append(name);
    button.addEventListener("click", () => sort(head));
  });

  // A click on any token chooses its column.
  document.addEventListener("click", (event) => {
    const cell = event.target.closest("table.tokens td[class]");
    const place = cell && /\bc(\d+)\b/.exec(cell.className);
    const pick = place && cell.closest(".rollout").querySelector(`.t${place[1]}`);
    if (pick) pick.checked = true;
  });

  // j and k go through the strategies, n and p through the answers, Escape singles out none.
  const step = (name, by) => {
    const choices = all(`input[name="${name}"]`);
    const at = choices.findIndex((choice) => choice.checked);
    const next = choices[(at + by + choices.length) % choices.length];
    if (next) next.checked = true;
  };
  const keys = {
    j: () => step("only", 1),
    k: () => step("only", -1),
    n: () => step("answer", 1),
    p: () => step("answer", -1),
    Escape: () => { const none = document.getElementById("only-none"); if (none) none.checked = true; },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const act = keys[event.key];
    if (act) act();
  });
  document.documentElement.classList.add("js");
})();
