/* Releases to ask about a bug. The document is that of course/site/widgets/release_bisect.py. */
"use strict";

/** The same as `known` there; `asked` are pairs of place and verdict. */
CourseWidgets.formulas.known = (asked, count, bad) => {
    const good = asked.filter(([, verdict]) => !verdict).map(([at]) => at);
    const below = Math.max(-1, ...good.filter((at) => at < bad));
    const above = Math.min(count, ...good.filter((at) => at > bad));
    const inside = [bad, ...asked.filter(([at, verdict]) => verdict && at > below && at < above).map(([at]) => at)];
    const first = Math.min(...inside), last = Math.max(...inside);
    return { first, last, below, above, done: first === below + 1 && last === above - 1 };
};

CourseWidgets.mount("release-bisect", (data) => {
    const { el, labelled, choice, formulas } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Releases to ask" });
    const byName = new Map(data.bugs.map((bug) => [`${bug.number}: ${bug.title}`, bug]));
    const bug = choice([...byName.keys()], null, () => begin());
    bug.dataset.input = "bug";
    const report = el("p", {});
    const rules = el("p", { class: "calc-presets" });
    const row = el("p", { class: "calc-presets", role: "group", "aria-label": "Releases" });
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    let asked = new Map();

    function current() { return byName.get(bug.value); }

    function begin() {
        asked = new Map();
        report.textContent = current().report;
        rules.replaceChildren("Which rule breaks? ", ...data.rules.map((rule) =>
            el("button", { type: "button", onclick: () => {
                const { rule: right, cause } = current();
                report.textContent = `${current().report} ${rule === right ? "Yes" : "No"}, ${right}. ${cause}`;
            } }, rule)));
        show();
    }

    function show() {
        const { verdicts, known } = current();
        const bad = verdicts.findIndex(([version]) => version === known);
        row.replaceChildren(...verdicts.map(([version, verdict], at) => {
            const seen = at === bad || asked.has(at);
            const words = at === bad ? `${version} bad, known` : seen ? `${version} ${verdict ? "bad" : "good"}` : version;
            return el("button", { type: "button", "data-at": at, ...(seen ? { disabled: "" } : {}),
                onclick: () => { asked.set(at, verdict); show(); } }, words);
        }));
        const found = formulas.known([...asked], verdicts.length, bad);
        const name = (at) => (at < 0 || at >= verdicts.length ? "none" : verdicts[at][0]);
        const count = `${asked.size} ${asked.size === 1 ? "release" : "releases"} asked`;
        said.dataset.done = found.done;
        said.textContent = found.done
            ? `${count}: bad from ${name(found.first)} to ${name(found.last)}, good before: ${name(found.below)}, good after: ${name(found.above)}.`
            : `${count}. Bad from ${name(found.first)} to ${name(found.last)} so far. Choose the release that tells most.`;
    }

    box.append(el("div", { class: "widget-form" }, labelled("A bug of the museum", bug)), report, rules, row, said);
    begin();
    return box;
});
