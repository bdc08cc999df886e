/* A broken rule and what notices it. The document is that of course/site/widgets/broken_rule.py. */
"use strict";

CourseWidgets.mount("broken-rule", (data) => {
    const { el, labelled, choice } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Break a rule" });
    const byRule = new Map(data.rules.map((each) => [each.rule, each]));
    const rule = choice([...byRule.keys()], null, () => update());
    rule.dataset.input = "rule";
    const edits = el("pre", { class: "broken-edits" });
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const before = el("pre", {});
    const cells = { field: el("code"), expected: el("code"), got: el("code") };
    const table = el("dl", { class: "broken-first" },
        el("dt", {}, "Field"), el("dd", {}, cells.field),
        el("dt", {}, "vLLM decided"), el("dd", {}, cells.expected),
        el("dt", {}, "The broken one"), el("dd", {}, cells.got));

    function update() {
        const { name, edits: lines, workloads, differ, recording, first } = byRule.get(rule.value);
        edits.replaceChildren(...lines.split("\n").map((line) => {
            const kind = { "-": "del", "+": "ins" }[line[0]];
            return kind ? el(kind, {}, `${line}\n`) : `${line}\n`;
        }));
        said.textContent = `The engine ${name}: ${differ} of the ${workloads} workloads of "${recording}" leave the recording. `
            + `The first is seed ${first.seed}, in step ${first.step}.`;
        said.dataset.differ = differ;
        before.textContent = first.before;
        for (const [key, cell] of Object.entries(cells)) cell.textContent = first[key];
    }

    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(el("div", { class: "widget-form" }, labelled("The rule", rule)), edits, said, table,
        el("p", {}, "Before that step:"), before);
    update();
    return box;
});
