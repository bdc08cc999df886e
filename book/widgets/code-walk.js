/* vLLM's own lines, stepped: under a shown function, what ran and what each name held (course/site/code_walks.py). */
"use strict";

CourseWidgets.walks = (() => {
    const { el, stepper } = CourseWidgets;

    /** Values by name at each event: the document says what is new, changed or gone. */
    const unfolded = (events) => {
        let now = {};
        return events.map(([line, changed, gone = []]) => {
            now = { ...now, ...changed };
            for (const name of gone) delete now[name];
            return { line, changed: Object.keys(changed), values: now };
        });
    };

    const mount = (host) => {
        const walk = JSON.parse(host.querySelector("script").textContent);
        const shown = host.closest(".upstream");
        const numbers = shown.querySelector(".upstream-numbers");
        const code = shown.querySelector("pre > code");
        const first = Number(numbers.textContent.split("\n")[0]);
        const count = numbers.textContent.trim().split("\n").length;
        const lines = code.textContent.split("\n");
        const steps = unfolded(walk.events);

        const lit = el("span", { class: "walk-lit", "aria-hidden": "true" });
        const box = el("section", { class: "walk widget-box", "aria-label": `${host.dataset.symbol}, line by line` });
        const said = el("p", { class: "walk-said" }, `${walk.said} (Run: ${walk.ran}.)`);
        const where = el("p", { class: "walk-where", "aria-live": "polite" });
        const table = el("dl", { class: "walk-values", "aria-label": "Values before the line" });
        const names = [...new Set(steps.flatMap((step) => step.changed))];
        const watch = el("select", { "aria-label": "Whose change" },
            el("option", { value: "" }, "any name"), names.map((name) => el("option", { value: name }, name)));
        let place = 0;

        const show = (to) => {
            place = to;
            const { line, changed, values } = steps[to];
            const row = (line || steps[to - 1].line) - first;
            const style = getComputedStyle(code);
            const height = (code.getBoundingClientRect().height - parseFloat(style.paddingTop)
                - parseFloat(style.paddingBottom)) / count;
            lit.style.top = `${code.offsetTop + parseFloat(style.paddingTop) + row * height}px`;
            lit.style.height = `${height}px`;
            lit.classList.toggle("walk-done", line === 0);
            where.replaceChildren(...(line
                ? [`Next, line ${line}: `, el("code", {}, lines[row].trim())]
                : ["Returns ", el("code", {}, walk.returns)]));
            table.replaceChildren(...Object.entries(values).map(([name, text]) =>
                el("div", { class: changed.includes(name) ? "walk-changed" : null },
                    el("dt", {}, name), el("dd", {}, text))));
        };
        const [controls, go] = stepper(box, steps.length, "line", show);
        const seek = () => {
            const next = steps.findIndex(({ changed }, at) =>
                at > place && (watch.value ? changed.includes(watch.value) : changed.length > 0));
            go(next < 0 ? steps.length - 1 : next);
        };
        controls.append(el("button", { type: "button", onclick: seek }, "To the next change of"), watch);
        box.append(said, controls, where, table);

        const open = el("button", { type: "button", class: "walk-open", "aria-expanded": "false" }, "Step through it");
        open.addEventListener("click", () => {
            const opens = box.hidden;
            box.hidden = !opens;
            open.setAttribute("aria-expanded", `${opens}`);
            open.textContent = opens ? "Put the steps away" : "Step through it";
            if (opens) {
                code.parentElement.append(lit);
                go(place);
            } else {
                lit.remove();
            }
        });
        box.hidden = true;
        host.append(open, box);
        host.hidden = false;
        new ResizeObserver(() => box.hidden || show(place)).observe(code);
    };

    const start = () => document.querySelectorAll(".code-walk").forEach(mount);
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
    else start();
    return { unfolded };
})();
