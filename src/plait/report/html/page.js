"use strict";
document.documentElement.classList.add("scripted");

// The flags, to copy.
const copy = document.getElementById("copy");
copy?.addEventListener("click", async () => {
  const code = document.getElementById("flags");
  getSelection().selectAllChildren(code);
  let done = false;
  try {
    await navigator.clipboard.writeText(code.textContent);
    done = true;
  } catch {  // no clipboard for a page out of a file, in some browsers
    done = document.execCommand("copy");
  }
  document.getElementById("copied").textContent = done ? "copied" : "selected: copy it";
});

// Details are open on paper.
const details = [...document.querySelectorAll("details")];
let closed = [];
addEventListener("beforeprint", () => {
  closed = details.filter((d) => !d.open);
  for (const d of closed) d.open = true;
});
addEventListener("afterprint", () => {
  for (const d of closed) d.open = false;
});

// The ranks.
const source = document.getElementById("ranks");
if (source) {
  const facts = JSON.parse(source.textContent);
  const input = document.getElementById("rank");
  const cells = [...document.querySelectorAll("td[data-rank]")];
  const at = (rank, size, stride) => Math.floor(rank / stride) % size;
  const together = (a, b, size, stride) =>
    Math.floor(a / stride / size) === Math.floor(b / stride / size) && a % stride === b % stride;
  const of = { expert: ["etp", "ep", "edp"], dense: ["tp", "ulysses", "cp", "fsdp"] };
  let held = false;

  const members = (rank, size, stride) => {
    const first = rank - at(rank, size, stride) * stride;
    const last = first + (size - 1) * stride;
    if (stride === 1) return `${first}-${last}`;
    const few = Array.from({ length: Math.min(size, size > 4 ? 3 : 4) }, (_, i) => first + i * stride);
    return few.join(", ") + (size > 4 ? ` ... ${last}` : "");
  };

  const show = (rank) => {
    for (const cell of cells) {
      const other = Number(cell.dataset.rank);
      const grid = cell.closest("table").dataset.grid;
      const elsewhere = grid === "dense" ? of.expert : of.dense;
      const axis = facts.axes.find(([name, size, stride]) =>
        name !== "world" && !elsewhere.includes(name) && together(rank, other, size, stride));
      cell.className = other === rank ? "self" : axis ? `a-${axis[0]}` : "";
    }
    const stage = String(at(rank, facts.stages, facts.stage));
    for (const table of document.querySelectorAll("table.sent"))
      table.hidden = !table.dataset.stages.split(" ").includes(stage);
    for (const [name, size, stride] of facts.axes)
      for (const cell of document.querySelectorAll(`[data-group="${name}"]`))
        cell.textContent = members(rank, size, stride);
    const places = Object.values(facts.places).map((axes) =>
      axes.map(([name, size, stride]) => `${name} ${at(rank, size, stride)}`).join(", "));
    if (facts.domain) places.push(`fast links with ${members(rank, Math.min(facts.domain, facts.world), 1)}`);
    document.getElementById("place").textContent = `rank ${rank}: ${places.join("; ")}`;
    if (input.value !== String(rank)) input.value = rank;
  };

  for (const table of document.querySelectorAll("table.grid")) {
    const own = [...table.querySelectorAll("td[data-rank]")];
    const rankOf = (event) => {
      const cell = event.target.closest("td[data-rank]");
      return cell && Number(cell.dataset.rank);
    };
    table.addEventListener("mouseover", (event) => {
      const rank = rankOf(event);
      if (rank !== null && !held) show(rank);
    });
    table.addEventListener("click", (event) => {
      const rank = rankOf(event);
      if (rank === null) return;
      held = !(held && input.value === String(rank));
      show(rank);
    });
    table.addEventListener("focusin", (event) => {
      const rank = rankOf(event);
      if (rank === null) return;
      for (const cell of own) cell.tabIndex = cell === event.target ? 0 : -1;
      show(rank);
    });
    table.addEventListener("keydown", (event) => {
      const i = own.indexOf(event.target);
      if (i < 0) return;
      const row = own[i].parentElement.querySelectorAll("td[data-rank]").length;
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, Home: -i, End: own.length - 1 - i };
      const next = own[i + steps[event.key]];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  }
  input.addEventListener("input", () => {
    const rank = Number(input.value);
    if (input.value === "" || !Number.isInteger(rank) || rank < 0 || rank >= facts.world) return;
    held = true;
    show(rank);
  });
  show(0);
}
