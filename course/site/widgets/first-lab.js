/* The lab on the home page: ten lines, one of them wrong, beside the run they make. The document is that of
 * course/site/widgets/first_lab.py: the answers to usual edits are ready; any other is run in this page.
 */
"use strict";

CourseWidgets.mount("first-lab", (given) => {
    const { el, inPage, sideways } = CourseWidgets;
    const words = { waiting: "waiting", starved: "running, given nothing", prefill: "prefill", decode: "decode" };
    const megabytes = Math.round(given.bytes / 1e6);
    const python = inPage("course.site.widgets.first_lab", given.bytes);

    /** A text without what means nothing: `key` of the module, in the same words. */
    const key = (text) => text.split("\n").map((row) => row.replace(/ *(#.*)?$/, "")).filter((row) => row)
        .map((row) => row.replace(/(?<=\w) +(?=[^\w ])|(?<=[^\w ]) +(?=\w)/g, "").replace(/(?<=\S) +/g, " ")).join("\n");

    const text = el("textarea", { rows: 10, wrap: "off", spellcheck: "false", autocapitalize: "off", autocomplete: "off",
        "aria-label": "The scheduler, ten lines", onkeydown: (event) => {
            if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
            event.preventDefault();
            go();
        } });
    text.value = given.text;
    const run = el("button", { type: "button", class: "first-go", onclick: () => go() }, "Run");
    const hint = el("button", { type: "button", onclick: () => help() }, "Hint");
    const reset = el("button", { type: "button", onclick: () => {
        text.value = given.text;
        hint.textContent = "Hint";
        go();
    } }, "Reset");
    const chart = el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "Requests by step" });
    const said = el("p", { class: "first-said", role: "status" });
    const on = el("p", { class: "first-on" }, el("a", { href: given.lab },
        window.CoursePlay?.ready ? "Open lab 00-01, nothing to install" : "Open lab 00-01"));
    const legend = el("p", { class: "first-legend" }, ["prefill", "decode", "waiting"].map((kind) =>
        el("span", {}, el("i", { class: `line-${kind}` }), words[kind])));

    function draw(made) {
        const steps = Array.from({ length: made.steps }, (_, step) => step);
        const stuck = (step) => made.trouble && step === made.steps - 1;
        chart.replaceChildren(el("table", {},
            el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "step"), steps.map((step) =>
                el("th", { scope: "col", class: stuck(step) ? "first-stuck" : null }, `${step}`)))),
            el("tbody", {}, Object.entries(made.rows).map(([name, cells]) => {
                const at = new Map(cells.map((cell) => [cell[0], cell]));
                return el("tr", { "data-request": name }, el("th", { scope: "row" }, name), steps.map((step) => {
                    const [, kind, tokens] = at.get(step) ?? [step, "absent", 0];
                    const title = kind === "absent" ? null : `${name}, step ${step}: ${words[kind]}`;
                    return el("td", { class: `line-${kind}`, "data-kind": kind, title }, tokens ? `${tokens}` : "");
                }));
            }))));
    }

    function verdict(made) {
        if (made.same) {
            const chunks = made.rows.C.filter(([, kind]) => kind === "prefill").map((cell) => cell[2]);
            return [el("b", {}, "Whole. "), `${made.steps} steps, each planned as vLLM's own scheduler plans it: C's prompt of `
                + `${given.requests.C.prompt} tokens came in chunks of ${chunks.join(", ")}, beside the decodes of A and B. `,
            el("a", { href: "PLAYGROUND.html" }, "vLLM's own scheduler, live"), "."];
        }
        if (made.trouble) return [el("b", {}, "Broken. "), `${made.trouble[0].toUpperCase()}${made.trouble.slice(1)}.`];
        return [el("b", {}, "Not yet. "), `All finish, after ${made.steps} steps by other plans than vLLM's own scheduler `
            + `makes; it needs ${given.needs}.`];
    }

    function show(made) {
        draw(made);
        said.replaceChildren(...verdict(made));
        box.dataset.state = made.same ? "whole" : made.trouble ? "broken" : "other";
    }

    async function go() {
        const ready = given.ready[key(text.value)];
        if (ready !== undefined) return show(given.outcomes[ready]);
        if (!python) {
            said.textContent = "This edit is not among those whose run was recorded, and this copy of the site has nothing "
                + "that runs Python.";
            return;
        }
        run.disabled = true;
        said.textContent = `This edit is not among those whose run was recorded: Python runs it here, ${megabytes} MB at the first time.`;
        try {
            show(await python.call("run", { text: text.value }));
        } catch (error) {
            said.replaceChildren(el("b", {}, "Not run. "), error.message);
            box.dataset.state = "broken";
        }
        run.disabled = false;
    }

    /** First the line, then what mends it. */
    function help() {
        const from = text.value.indexOf(given.wrong);
        if (from < 0) {
            said.textContent = "The line that was wrong is not there any more: Run shows what yours does, Reset brings it back.";
            return;
        }
        text.focus();
        text.setSelectionRange(from, from + given.wrong.length);
        if (hint.textContent === "Hint") {
            said.textContent = `This line. A prompt longer than the budget of ${given.budget} tokens never gets one: give it as many as `
                + "the step has left, and the rest later.";
            hint.textContent = "Mend it for me";
        } else {
            text.setRangeText(given.mended, from, from + given.wrong.length, "select");
            hint.textContent = "Hint";
            go();
        }
    }

    const { A, B, C, D } = given.requests;
    const box = el("section", { class: "widget-box first-lab", "aria-label": "One line is wrong: mend it" },
        el("p", { class: "first-ask" }, el("b", {}, "One of these ten lines is wrong. "),
            `Four requests share ${given.budget} tokens a step; their prompts have ${A.prompt}, ${B.prompt}, ${C.prompt} and `
            + `${D.prompt}. C never begins, and D waits behind it. Mend the line, and Run.`),
        el("div", { class: "first-two" }, el("div", { class: "first-code" }, text,
            el("p", { class: "first-bar" }, run, hint, reset, el("span", { class: "first-keys" }, "Ctrl-Enter runs"))),
        el("div", { class: "first-run" }, chart, sideways(chart), legend, said, python?.box ?? null, on)));
    show(given.outcomes[given.ready[key(given.text)]]);
    return box;
});
