/* The page of incidents: a day's log and metrics, a cause from the list, a knob and a value. The document is that of
 * course/site/widgets/incident_days.py; what is right is said by its Python, in this page. Kept by `CourseStore.saveIncident`.
 */
"use strict";

CourseWidgets.mount("incident-days", (data) => {
    const { el, count, labelled } = CourseWidgets;
    const python = CourseWidgets.inPage("course.site.widgets.incident_days", data.bytes);
    const STARTED = { wrong: [], cause: "", replays: 0, fix: "" };
    const LONGEST = 300; // characters of a quoted line
    let day = data.days[0];
    let busy = false;

    const options = (names, words = (name) => name) => names.map((name) => el("option", { value: name }, words(name)));
    const which = el("select", { onchange: () => choose(which.value) }, options(data.days.map((each) => each.name)));
    const complaint = el("p", { class: "widget-title" });
    const log = el("pre", { tabindex: "0", role: "region", "aria-label": "The log, five times a second" }, el("code", {}));
    const metrics = el("table", {});
    const file = el("select", { onchange: () => void (whole.hidden = true) },
        options(["server.log", "metrics.txt", "trace.jsonl.gz", "requests.jsonl"]));
    const open = el("button", { type: "button", onclick: () => show() }, "Show all of it");
    const whole = el("pre", { class: "incident-whole", tabindex: "0", role: "region", "aria-label": "All that was recorded", hidden: "" }, el("code", {}));
    const cause = el("select", {}, options(Object.keys(data.causes), (name) => `${name}: ${data.causes[name]}`));
    const name = el("button", { type: "button", onclick: () => diagnose() }, "Hold it against the recording");
    const verdict = el("p", { role: "status" });
    const quoted = el("pre", { tabindex: "0", role: "region", "aria-label": "The line that contradicts it", hidden: "" }, el("code", {}));
    const knob = el("select", { onchange: () => void (value.value = day.knobs[knob.value]) });
    const value = el("input", { type: "text", size: 8, autocomplete: "off" });
    const turn = el("button", { type: "button", onclick: () => replay() }, "Replay the day");
    const fix = el("div", { class: "incident-fix" });
    const came = el("table", { hidden: "" });
    const held = el("p", { role: "status" });
    const limit = el("p", {});
    const alone = python ? "" : el("p", {}, "This copy of the site runs no Python. In a checkout: ", el("code", {}, "course incident"));

    const entry = () => CourseStore.incident(day.name) ?? STARTED;
    const keep = (change) => CourseStore.saveIncident(day.name, { ...entry(), ...change });
    const cells = (tag, values) => values.map((each) => el(tag, {}, typeof each === "number" ? count(each) : each));

    function choose(wanted) {
        day = data.days.find((each) => each.name === wanted);
        which.value = wanted;
        complaint.textContent = day.complaint;
        log.firstChild.textContent = day.log.join("\n");
        metrics.replaceChildren(el("thead", {}, el("tr", {}, cells("th", ["/metrics", ...day.moments]))),
            el("tbody", {}, day.metrics.map(([metric, ...values]) => el("tr", {}, el("th", { scope: "row" }, metric),
                values.map((each) => el("td", {}, Number.isInteger(each) ? count(each) : each.toFixed(3)))))));
        for (const each of [whole, quoted, came]) each.hidden = true;
        limit.textContent = `The limit: ${day.limit}.`;
        knob.replaceChildren(...options(Object.keys(day.knobs)));
        value.value = day.knobs[knob.value];
        held.textContent = entry().fix ? `The limit held with ${entry().fix}.` : "";
        said();
    }

    function said() {
        const { wrong, cause: right } = entry();
        fix.hidden = !right;
        verdict.textContent = right ? `Nothing that was recorded contradicts ${right}.`
            : wrong.length ? `Contradicted so far: ${wrong.join(", ")}.` : "";
        if (right) cause.value = right;
    }

    /** Ask the page's Python, one thing at a time; undefined where it failed, which is said in `box`. */
    async function ask(box, called, given) {
        if (!python || busy) return undefined;
        busy = true;
        for (const each of [open, name, turn]) each.disabled = true;
        try {
            return await python.call(called, given);
        } catch (error) {
            box.textContent = error.message;
            return undefined;
        } finally {
            busy = false;
            for (const each of [open, name, turn]) each.disabled = false;
        }
    }

    async function show() {
        const text = await ask(verdict, "whole", { name: day.name, file: file.value });
        if (text === undefined) return;
        whole.firstChild.textContent = text;
        whole.hidden = false;
    }

    async function diagnose() {
        const asked = cause.value;
        const found = await ask(verdict, "diagnose", { name: day.name, cause: asked });
        if (found === undefined) return;
        quoted.hidden = found === null;
        if (found === null) {
            keep({ cause: asked });
            said();
            return;
        }
        keep({ wrong: [...new Set([...entry().wrong, asked])] });
        said();
        verdict.textContent = `${found.file}, line ${found.line}, contradicts ${asked}: ${found.says}.`;
        quoted.firstChild.textContent = found.quoted.length > LONGEST ? `${found.quoted.slice(0, LONGEST)} ...` : found.quoted;
    }

    async function replay() {
        const set = { knob: knob.value, value: value.value.trim() };
        const found = await ask(held, "turn", { name: day.name, ...set });
        if (found === undefined) return;
        came.hidden = false;
        came.replaceChildren(el("thead", {}, el("tr", {}, cells("th", ["counted", "that day", `${set.knob}=${set.value}`]))),
            el("tbody", {}, Object.keys(found.after).map((each) => el("tr", {}, el("th", { scope: "row" }, each),
                cells("td", [found.before[each], found.after[each]])))));
        const fixed = `${set.knob}=${set.value}`;
        keep({ replays: entry().replays + 1, ...(found.missed ? {} : { fix: fixed }) });
        held.textContent = found.missed ? `Not yet: ${found.missed}.` : `The limit holds with ${fixed}.`;
    }

    fix.append(limit, el("p", { class: "knob-ask" }, labelled("Turn", knob), labelled("to", value), turn),
        el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "What was counted" }, came), held);
    for (const each of [open, name, turn]) each.disabled = !python;
    choose(data.days[0].name);
    return el("section", { class: "widget-box incident", "aria-label": "A bad day" },
        el("p", { class: "knob-ask" }, labelled("Day", which)), complaint, log,
        el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "/metrics by moment" }, metrics),
        el("p", { class: "knob-ask" }, labelled("File", file), open), whole, alone, python?.box ?? "",
        el("p", { class: "knob-ask" }, labelled("Cause", cause), name), verdict, quoted, fix);
});
