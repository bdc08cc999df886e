/* "Ask vLLM": the run of a live engine, decided by a release of vLLM itself in the same worker, step beside step.
 *
 * The answers are those of course/site/live_real.py. Nothing global but `CourseReal`.
 */
"use strict";

const CourseReal = (() => {
    const { el } = CourseWidgets;
    const PIN = "0.22.1";
    const SHOWN = [["running", "running"], ["waiting", "waiting"], ["tables", "blocks"], ["free", "free, next first"]];

    /** What a step decides, in a line. */
    function plan(step) {
        const counts = Object.entries(step.tokens).map(([id, count]) => `${id} ${count}`).join(", ") || "nothing";
        return step.preempted.length ? `${counts}; preempts ${step.preempted.join(", ")}` : counts;
    }

    /** A value of a step as text. */
    function text(value) {
        if (Array.isArray(value)) return value.join(" ") || "none";
        if (value === null || typeof value !== "object") return `${value}`;
        return Object.entries(value).map(([id, of]) => `${id}: ${text(of)}`).join("; ") || "none";
    }

    /** What both decided, in words: where they part, or that they do not. `name` is what the other engine is called. */
    function verdict({ difference, steps, release }, name) {
        return difference
            ? `Step ${difference.step} is the first that differs, in ${difference.words}. vLLM ${release}: `
                + `${text(difference.real)}. ${name}: ${text(difference.ours)}.`
            : `${steps.length} steps, the same in vLLM ${release} and ${name}: who runs with how many `
                + "tokens, who is preempted, both queues, every block table and the order of the free queue.";
    }

    /** The part of a page that asks: { box, clear, show }.
     *
     * `fetch(release)` answers with the document, or null when it was refused; `go(place)` shows a step of the run;
     * `predicts()` says whether the reader wants to be asked first; `name` is what the other engine is called.
     */
    function build({ fetch, go, predicts, name }) {
        let told = null; // the document that is shown
        let place = 0;
        const button = el("button", { type: "button", class: "real-ask", onclick: () => ask() }, "Ask vLLM");
        const release = el("select", { "aria-label": "Release of vLLM", onchange: () => told && ask() }, el("option", {}, PIN));
        const choose = el("label", { hidden: "" }, "release ", release);
        const question = el("div", { class: "live-question", "aria-live": "polite" });
        const line = el("p", { class: "real-verdict", role: "status" });
        const body = el("tbody", {});
        const head = el("tr", {});
        const scroll = el("div", { class: "line-scroll real-steps", tabindex: "0", role: "region", "aria-label": "Both schedulers, step by step" },
            el("table", {}, el("thead", {}, head), body));
        const beside = el("div", { class: "real-beside" });
        const answer = el("div", { hidden: "" }, scroll, beside);
        const box = el("div", { class: "real" },
            el("p", { class: "real-bar" }, button, " ", choose, el("span", {}, " The same requests and tokens, decided by vLLM's own scheduler in this page.")),
            question, line, answer);

        async function ask() {
            button.disabled = true;
            try {
                clear();
                const made = await fetch(release.value);
                if (!made) return;
                told = made;
                choose.hidden = made.releases.length < 2;
                release.replaceChildren(...made.releases.map((each) =>
                    el("option", { selected: each === made.release ? "" : null }, each)));
                if (!made.steps.length) {
                    line.textContent = "Nothing is decided yet: press Step or Play first.";
                } else if (predicts()) pose();
                else reveal();
            } finally {
                button.disabled = false;
            }
        }

        function pose() {
            const parts = told.difference !== null;
            const said = (guess) => {
                question.replaceChildren(el("p", { class: guess === parts ? "live-right" : "live-wrong" },
                    guess === parts ? "Right." : "Not this time."));
                reveal();
            };
            const choice = (label, guess) => el("button", { type: "button", onclick: () => said(guess) }, label);
            question.replaceChildren(
                el("p", {}, `Predict. Over these ${told.steps.length} steps, does vLLM ${told.release} decide as ${name} does?`),
                el("p", {}, choice("yes, every step", false), choice("no, they part", true)));
        }

        function reveal() {
            const { difference, steps, ours } = told;
            const at = difference ? difference.step : steps.length;
            head.replaceChildren(...["step", `vLLM ${told.release}`, name].map((each) => el("th", { scope: "col" }, each)));
            body.replaceChildren(...steps.map((step, number) => el("tr",
                { class: number === at ? "real-parts" : null, onclick: () => go(number + 1) },
                el("th", { scope: "row" }, el("button", { type: "button", onclick: () => go(number + 1) }, `${number}`)),
                el("td", {}, plan(step)),
                el("td", {}, number < at ? "the same" : `${number > at ? "(after they parted) " : ""}${plan(ours[number])}`))));
            line.textContent = verdict(told, name);
            line.classList.toggle("real-differs", difference !== null);
            answer.hidden = false;
            show(difference ? at + 1 : place);
            body.querySelector(".real-parts")?.scrollIntoView({ block: "nearest" });
        }

        /** Show frame `at` of the run (0 is before step 0) in both. */
        function show(at) {
            place = at;
            for (const row of body.rows) row.classList.toggle("line-now", row.rowIndex === at);
            const pair = told && !answer.hidden ? [told.steps[at - 1], told.ours[at - 1]] : [];
            beside.replaceChildren(...pair.filter(Boolean).map((step, side) => el("div", {},
                el("h4", {}, `${side ? name : `vLLM ${told.release}`}, after step ${at - 1} was planned`),
                el("dl", {}, SHOWN.map(([key, label]) => {
                    const differs = text(pair[0][key]) !== text(pair[1]?.[key]);
                    return [el("dt", {}, label), el("dd", { class: differs ? "real-other" : null }, text(step[key]))];
                })))));
        }

        /** The run has changed: what was answered was about another one. */
        function clear() {
            told = null;
            answer.hidden = true;
            line.textContent = "";
            line.classList.remove("real-differs");
            question.replaceChildren();
            beside.replaceChildren();
        }

        return { box, clear, show, release: () => release.value, ask };
    }

    return { build, plan, text, verdict };
})();
