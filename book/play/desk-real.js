/* "Ask vLLM" of a lab's desk: a workload, decided or counted by vLLM's own scheduler beside the reader's text.
 *
 * Loaded when the fold is opened first. The answers are those of course/site/desk_real.py.
 */
"use strict";

/** Fill the fold `box`; `session` runs Python, `text()` is what stands in the editor. Returns { offer }. */
CourseDesk.real = ({ box, lab, workload, session, text }) => {
    const { el, button } = CourseDesk;
    const PIN = "0.22.1";
    const field = el("textarea", { rows: 6, spellcheck: "false", "aria-label": "Workload: a seed, or requests as YAML",
        style: "width: 100%; box-sizing: border-box; font-family: var(--mono-font)" });
    field.value = workload;
    const verdict = el("p", { role: "status" });
    const body = el("tbody", {});
    const table = el("div", { class: "line-scroll", tabindex: "0", role: "region", hidden: true, "aria-label": "Both, row by row",
        style: "max-height: 20em; overflow: auto" },
        el("table", {}, el("thead", {}, el("tr", {}, ["", `vLLM ${PIN}`, "yours"].map((each) => el("th", {}, each)))), body));
    const run = button("Ask vLLM", () => ask());
    const stop = button("Stop", () => session.stop(), { hidden: true });
    box.append(el("p", {}, "A workload of yours, or the seed of a recorded one that failed. Predict before you look."),
        field, el("p", { class: "desk-bar" }, run, stop), verdict, table);

    async function ask() {
        run.disabled = true;
        stop.hidden = false;
        table.hidden = true;
        verdict.textContent = "Asking ...";
        try {
            show(await session.call("python", { module: "course.site.desk_real", function: "ask_mine",
                arguments: { lab, text: text(), workload: field.value } }));
        } catch (error) {
            verdict.textContent = error.message.replace(/^ValueError: /, "");
        }
        run.disabled = false;
        stop.hidden = true;
    }

    function show(told) {
        const at = told.at ?? told.rows.length;
        const other = { style: "color: inherit; background: color-mix(in srgb, red 22%, transparent)" };
        const mine = (row, ours) => (row < at ? "the same" : row === at ? el("mark", other, `differs: ${ours || "an error"}`) : "");
        body.replaceChildren(...told.rows.map(([name, real, ours], row) => el("tr", {}, el("th", { scope: "row" }, name),
            el("td", {}, real), el("td", {}, mine(row, ours)))));
        verdict.textContent = told.verdict;
        table.hidden = false;
    }

    /** After a grading: the seed of the first failing test's workload, where its message names one. */
    function offer(message) {
        const seed = /\b(?:seed|workload) (\d+)\b/.exec(message)?.[1];
        if (seed) field.value = seed;
    }

    return { offer };
};
