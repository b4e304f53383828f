// A text area for Python: line numbers, four spaces for Tab, the line of a fault marked, Ctrl-Enter or Cmd-Enter to run the check.
const INDENT = "    ";

function indent(area) {
  const { selectionStart: start, selectionEnd: end, value } = area;
  if (start === end) {
    area.setRangeText(INDENT, start, end, "end");
    return;
  }
  const from = value.lastIndexOf("\n", start - 1) + 1;
  const lines = value.slice(from, end).split("\n").map((line) => INDENT + line);
  area.setRangeText(lines.join("\n"), from, end, "select");
}

function dedent(area) {
  const { selectionStart: start, selectionEnd: end, value } = area;
  const from = value.lastIndexOf("\n", start - 1) + 1;
  const lines = value.slice(from, end).split("\n").map((line) => line.replace(/^ {1,4}/, ""));
  area.setRangeText(lines.join("\n"), from, end, start === end ? "end" : "select");
}

function newline(area) {
  const before = area.value.slice(0, area.selectionStart).split("\n").pop();
  const spaces = before.match(/^ */)[0] + (before.trimEnd().endsWith(":") ? INDENT : "");
  area.setRangeText("\n" + spaces, area.selectionStart, area.selectionEnd, "end");
}

export default {
  render({ model, el }) {
    const box = document.createElement("div");
    box.className = "kvlab-code-area";
    const gutter = document.createElement("div");
    gutter.className = "kvlab-gutter";
    gutter.setAttribute("aria-hidden", "true");
    const area = document.createElement("textarea");
    area.spellcheck = false;
    area.wrap = "off";
    area.setAttribute("aria-label", "policy source");
    area.setAttribute("data-lm-suppress-shortcuts", "true");
    box.append(gutter, area);
    el.appendChild(box);

    const number = () => {
      const wrong = model.get("error_line");
      gutter.replaceChildren(
        ...area.value.split("\n").map((_, i) => {
          const line = document.createElement("div");
          line.textContent = String(i + 1);
          if (i + 1 === wrong) line.className = "wrong";
          return line;
        }),
      );
      gutter.scrollTop = area.scrollTop;
    };
    const size = () => {
      box.style.height = `${Math.min(30, Math.max(10, area.value.split("\n").length + 1)) * 1.45 * 13 + 16}px`;
    };
    const typed = () => {
      model.set("error_line", 0);
      model.set("value", area.value);
      model.save_changes();
      number();
      size();
    };
    const show = () => {
      if (area.value !== model.get("value")) area.value = model.get("value");
      number();
      size();
    };
    area.addEventListener("input", typed);
    area.addEventListener("scroll", () => (gutter.scrollTop = area.scrollTop));
    area.addEventListener("keydown", (event) => {
      event.stopPropagation(); // the notebook's own keys are for cells
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        model.set("num_runs", model.get("num_runs") + 1);
        model.save_changes();
      } else if (event.key === "Tab" && !event.ctrlKey && !event.altKey) {
        event.preventDefault();
        (event.shiftKey ? dedent : indent)(area);
        typed();
      } else if (event.key === "Enter" && !event.shiftKey && !event.altKey) {
        event.preventDefault();
        newline(area);
        typed();
      } else if (event.key === "Escape") {
        area.blur(); // Tab then leaves the field: nobody is caught in it
      }
    });
    model.on("change:value", show);
    model.on("change:error_line", number);
    show();
  },
};
