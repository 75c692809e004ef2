"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  root.classList.add("js");

  // Theme: the system's, until the button is used.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = $("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();

  // Which setting the figures show. Without this script all of them do.
  const setting = $("setting");
  const choose = () => {
    for (const part of document.querySelectorAll("[data-setting]")) {
      part.hidden = !part.dataset.setting.trim().split(" ").includes(setting.value);
    }
  };
  if (setting.options.length > 1) {
    $("choose").hidden = false;
    setting.addEventListener("change", choose);
    choose();
  }

  // Long heat maps begin folded.
  for (const button of document.querySelectorAll("button.all")) {
    const block = button.parentElement;
    block.classList.add("collapsed");
    button.hidden = false;
    button.addEventListener("click", () => { block.classList.remove("collapsed"); button.hidden = true; });
  }

  // On paper nothing can be unfolded.
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });

  // Tips: the nearest mark under the pointer, or the arrow keys on a focused chart.
  const tip = $("tip");
  let active = null;
  const leave = () => {
    if (active) active.classList.remove("active");
    active = null;
    tip.hidden = true;
  };
  const show = (mark) => {
    leave();
    active = mark;
    mark.classList.add("active");
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const box = mark.getBoundingClientRect();
    const x = box.left + box.width / 2 - tip.offsetWidth / 2;
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (above < 8 ? box.bottom + 8 : above) + "px";
  };
  for (const chart of document.querySelectorAll("svg.chart")) {
    const marks = [...chart.querySelectorAll(".mark[data-tip]")];
    if (!marks.length) continue;
    chart.addEventListener("pointermove", (event) => {
      let best = null;
      let least = 24 * 24;
      for (const mark of marks) {
        const box = mark.getBoundingClientRect();
        const dx = box.left + box.width / 2 - event.clientX;
        const dy = box.top + box.height / 2 - event.clientY;
        if (dx * dx + dy * dy < least) { least = dx * dx + dy * dy; best = mark; }
      }
      if (best) { if (best !== active) show(best); } else leave();
    });
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("blur", leave);
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      show(marks[(marks.indexOf(active) + step + (active || step > 0 ? 0 : 1) + marks.length) % marks.length]);
    });
  }
  addEventListener("scroll", leave, { passive: true });

  // The table of all runs.
  const data = JSON.parse($("data").textContent);
  const table = $("table");
  const page = 50;
  let shown = page;
  let sorted = { column: -1, sign: 1 };
  const text = (column, value) =>
    value === null ? "\u2013" : column.digits === null ? String(value) : value.toFixed(column.digits);
  const element = (name, content, attributes = {}) => {
    const node = document.createElement(name);
    if (content !== undefined) node.textContent = content;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };

  const form = $("filters");
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  const label = (name, control) => {
    const node = element("label", name);
    node.append(control);
    form.append(node);
    return control;
  };
  const search = label("search", element("input", undefined, { type: "search", placeholder: "policy, mask, \u2026" }));
  search.addEventListener("input", () => { shown = page; draw(); });
  const selects = data.filters.map((index) => {
    const select = label(data.columns[index].name, element("select"));
    const values = [...new Set(data.rows.map((row) => row[index]))].sort();
    select.append(element("option", "all", { value: "" }));
    values.forEach((value, i) => select.append(element("option", String(value), { value: i + 1 })));
    select.addEventListener("change", () => { shown = page; draw(); });
    return { index, select, values };
  });

  const chosen = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = data.rows.filter(
      (row) =>
        selects.every(({ index, select, values }) => !select.value || row[index] === values[select.value - 1]) &&
        words.every((word) => data.columns.some((c, i) => c.digits === null && String(row[i]).toLowerCase().includes(word))),
    );
    const { column, sign } = sorted;
    if (column < 0) return rows;
    const compare = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
    return rows.sort((p, q) => {
      const a = p[column];
      const b = q[column];
      if (a === null || b === null) return (a === null) - (b === null); // missing ones last, either way
      return sign * compare(a, b);
    });
  };

  const head = element("thead");
  const headRow = element("tr");
  const headers = data.columns.map((column, i) => {
    const cell = element("th", undefined, { scope: "col" });
    if (column.digits !== null) cell.className = "n";
    const button = element("button", column.name, { type: "button" });
    button.addEventListener("click", () => {
      // Text begins at A; figures at the largest.
      const first = column.digits === null ? 1 : -1;
      sorted = { column: i, sign: sorted.column === i ? -sorted.sign : first };
      draw();
    });
    cell.append(button);
    headRow.append(cell);
    return cell;
  });
  head.append(headRow);
  const body = element("tbody");
  table.append(head, body);

  const draw = () => {
    const rows = chosen();
    headers.forEach((cell, i) => {
      if (i === sorted.column) cell.setAttribute("aria-sort", sorted.sign > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    });
    body.replaceChildren(
      ...rows.slice(0, shown).map((row) => {
        const line = element("tr");
        data.columns.forEach((column, i) => {
          const cell = column.sticky
            ? element("th", undefined, { scope: "row", class: "policy" })
            : element("td", undefined, column.digits === null ? {} : { class: "n" });
          if (column.sticky) {
            for (const part of text(column, row[i]).split(/(?<=[+/,_])|(?=[([])/)) cell.append(part, element("wbr"));
          } else cell.textContent = text(column, row[i]);
          line.append(cell);
        });
        return line;
      }),
    );
    const visible = Math.min(shown, rows.length);
    $("status").textContent =
      `${visible} of ${rows.length} runs` + (rows.length < data.rows.length ? ` (of ${data.rows.length} in all)` : "");
    const more = $("more");
    more.hidden = visible === rows.length;
    more.textContent = `Show ${Math.min(page * 4, rows.length - visible)} more`;
  };
  $("more").addEventListener("click", () => { shown += page * 4; draw(); });
  draw();
})();
