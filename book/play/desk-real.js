/* "Ask vLLM" of a lab's desk: a workload, decided by vLLM's own scheduler beside the reader's text.
 *
 * The answers are those of course/site/desk_real.py.
 */
"use strict";

/** The fold below the results: { box, offer }; null where the lab supplies no part that decides.
 *
 * `part` is the engine's name of what the lab builds, `session` runs Python, `text()` is what stands in the editor.
 */
CourseDesk.real = ({ part, session, text }) => {
    const { el, button } = CourseDesk;
    if (!session || !["block_pool", "kv_cache_manager", "scheduler"].includes(part)) return null;
    const PIN = "0.22.1";
    const field = el("textarea", { rows: 5, spellcheck: "false", "aria-label": "Workload: a seed, or requests as YAML",
        style: "width: 100%; box-sizing: border-box; font-family: var(--mono-font)" });
    field.value = "config: {num_blocks: 9, block_size: 4}\nrequests:\n- {id: A, prompt: 11, max_tokens: 12}\n"
        + "- {id: B, prompt: 11, max_tokens: 12}\n- {id: C, prompt: 5, max_tokens: 3, step: 2}";
    const verdict = el("p", { role: "status" });
    const body = el("tbody", {});
    const table = el("div", { class: "line-scroll", tabindex: "0", role: "region", hidden: true, "aria-label": "Both, step by step",
        style: "max-height: 20em; overflow: auto" },
        el("table", {}, el("thead", {}, el("tr", {}, ["step", `vLLM ${PIN}`, "yours"].map((each) => el("th", {}, each)))), body));
    const run = button("Ask vLLM", () => ask());
    const stop = button("Stop", () => session.stop(), { hidden: true });
    const box = el("details", {}, el("summary", {}, "Ask vLLM: its own scheduler beside yours"),
        el("p", {}, "A workload of yours, or the seed of a recorded one that failed. Predict the first step before you look."),
        field, el("p", { class: "desk-bar" }, run, stop), verdict, table);

    async function ask() {
        run.disabled = true;
        stop.hidden = false;
        table.hidden = true;
        verdict.textContent = "Asking ...";
        try {
            const told = await session.call("python", { module: "course.site.desk_real", function: "ask_mine",
                arguments: { part, text: text(), workload: field.value } });
            show(told);
        } catch (error) {
            verdict.textContent = error.message.replace(/^ValueError: /, "");
        }
        run.disabled = false;
        stop.hidden = true;
    }

    function show({ release, rows, difference, fault }) {
        const at = difference ? difference.step : rows.length;
        const other = { style: "color: inherit; background: color-mix(in srgb, red 22%, transparent)" };
        const mine = (step, ours) => (step < at ? "the same"
            : step === at ? el("mark", other, `differs: ${ours || "an error"}`) : "");
        body.replaceChildren(...rows.map(([real, ours], step) => el("tr", {}, el("th", { scope: "row" }, `${step}`),
            el("td", {}, real), el("td", {}, mine(step, ours)))));
        verdict.textContent = (difference
            ? `Step ${difference.step} is the first that differs, in ${difference.field}: ${difference.words}. `
                + `vLLM ${release}: ${difference.real}. Yours: ${difference.ours}.`
            : `${rows.length} steps, the same in vLLM ${release} and in yours.`) + (fault ? ` vLLM ends here: ${fault}.` : "");
        table.hidden = false;
    }

    /** After a grading: the seed of the first failing test's workload, where its message names one. */
    function offer(message) {
        const seed = /\b(?:seed|workload) (\d+)\b/.exec(message)?.[1];
        if (seed) field.value = seed;
    }

    return { box, offer };
};
