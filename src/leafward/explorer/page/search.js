// Finding points by name, from the keyboard: an input with a list of matches (the combobox pattern of WAI-ARIA).

const LISTED = 30;

/** Indices of the labels that contain the text, those that begin with it first, then shorter ones first. */
export function matches(folded, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [];
  const found = [];
  folded.forEach((label, id) => {
    const at = label.indexOf(wanted);
    if (at >= 0) found.push({ id, rank: (at === 0 ? 0 : 1e6) + label.length });
  });
  return found.sort((a, b) => a.rank - b.rank).map(({ id }) => id);
}

export class Search {
  /** `report` is {found(ids | null), choose(id)}: what matches (null: nothing is asked), and what was chosen. */
  constructor(input, list, count, labels, report) {
    Object.assign(this, { input, list, count, labels, report });
    this.folded = labels.map((label) => label.toLowerCase());
    this.ids = [];
    this.active = -1;
    input.addEventListener("input", () => this.update());
    input.addEventListener("focus", () => this.open(this.ids.length > 0));
    input.addEventListener("blur", () => this.open(false));
    input.addEventListener("keydown", (event) => this.key(event));
    list.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // keeps the focus in the input
      const option = event.target.closest("[role=option]");
      if (option) this.choose(Number(option.dataset.id));
    });
  }

  update() {
    const asked = this.input.value.trim() !== "";
    this.ids = matches(this.folded, this.input.value);
    this.report.found(asked ? this.ids : null);
    this.list.replaceChildren(...this.ids.slice(0, LISTED).map((id, i) => this.option(id, i)));
    this.count.textContent = asked ? `${this.ids.length.toLocaleString("en")} found` : "";
    this.open(this.ids.length > 0);
    this.activate(this.ids.length ? 0 : -1);
  }

  option(id, i) {
    const option = document.createElement("li");
    option.id = `match-${i}`;
    option.setAttribute("role", "option");
    option.dataset.id = id;
    option.textContent = this.labels[id];
    return option;
  }

  open(open) {
    this.list.hidden = !open;
    this.input.setAttribute("aria-expanded", String(open));
  }

  activate(index) {
    this.active = index;
    [...this.list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === index)));
    if (index < 0) this.input.removeAttribute("aria-activedescendant");
    else this.input.setAttribute("aria-activedescendant", `match-${index}`);
    this.list.children[index]?.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const shown = this.list.children.length;
    if (event.key === "ArrowDown" && shown) this.activate((this.active + 1) % shown);
    else if (event.key === "ArrowUp" && shown) this.activate((this.active - 1 + shown) % shown);
    else if (event.key === "Enter" && this.active >= 0) this.choose(this.ids[this.active]);
    else return;
    event.preventDefault();
  }

  choose(id) {
    this.input.value = this.labels[id];
    this.ids = [];
    this.list.replaceChildren();
    this.open(false);
    this.activate(-1);
    this.count.textContent = "";
    this.report.found(null);
    this.report.choose(id);
  }

  clear() {
    this.input.value = "";
    this.update();
  }
}
