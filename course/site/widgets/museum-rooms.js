/* The bug museum: a report, which rule breaks and when, then who has it. The document is that of
 * course/site/widgets/museum_rooms.py, which also runs an exhibit in this page.
 */
"use strict";

CourseWidgets.mount("museum-rooms", (data) => {
    const { el, labelled } = CourseWidgets;
    const python = CourseWidgets.inPage("course.site.widgets.museum_rooms", data.bytes);
    const HOW = { mini: "the mini part, run in this page", run: "its own code, run in this page", recorded: "recorded" };
    const placed = new Map(); // by number, whether the room was named at once
    let exhibit = data.exhibits[0];
    let room = "";
    let turn = 0; // counts choices: an answer that comes later than the next choice is not shown

    const box = el("section", { class: "widget-box museum", "aria-label": "The museum: one bug at a time" });
    const which = el("select", { "data-input": "exhibit", onchange: () => choose(data.exhibits[which.selectedIndex]) },
        data.exhibits.map(({ number, title }) => el("option", {}, `${number}: ${title}`)));
    const report = el("p", {});
    const given = el("ul", { class: "museum-given" });
    const rooms = el("p", { class: "decide-choices museum-rooms", role: "group", "aria-label": "Which rule breaks?" });
    const buttons = Object.entries(data.rooms).map(([name, what]) =>
        el("button", { type: "button", title: what, "aria-pressed": "false", onclick: () => name !== room && pick(name) }, name));
    rooms.append(...buttons);
    const meaning = el("p", { class: "museum-rule" });
    const step = el("input", { type: "number", min: 0, inputmode: "numeric", "data-input": "step" });
    const when = labelled("", step);
    const go = el("button", { type: "button", class: "museum-go", onclick: () => run() });
    const verdict = el("p", { class: "knob-reply decide-reply", "aria-live": "polite" });
    const answers = el("div", { class: "museum-answers" });
    const why = el("p", {});
    const tally = el("p", { class: "film-none" });

    function choose(chosen) {
        exhibit = chosen;
        turn += 1;
        room = "";
        step.value = "";
        const also = exhibit.also.length ? `, also ${exhibit.also.join(", ")}` : "";
        report.replaceChildren(el("b", {}, `${exhibit.title[0].toUpperCase()}${exhibit.title.slice(1)}.`), ` ${exhibit.report} `, el("a", { href: exhibit.url }, `${exhibit.number}`), also);
        given.replaceChildren(...exhibit.given.map((line) => el("li", {}, line)));
        given.hidden = !exhibit.given.length;
        when.hidden = exhibit.step === null;
        when.firstChild.textContent = exhibit.when;
        for (const button of buttons) {
            button.className = "";
            button.setAttribute("aria-pressed", "false");
        }
        meaning.textContent = "Which rule breaks? Choose one to read what it asks.";
        for (const each of [verdict, answers, why]) each.replaceChildren();
        go.textContent = python ? python.offer("Run it") : "Show what was recorded";
    }

    function pick(name) {
        room = name;
        buttons.forEach((button) => button.setAttribute("aria-pressed", `${button.textContent === name}`));
        meaning.textContent = `${name}: ${data.rooms[name]}.`;
    }

    async function run() {
        if (!room || (!when.hidden && step.value === "")) {
            verdict.textContent = room ? "Say a step first." : "Choose a rule first.";
            return;
        }
        const mine = turn;
        go.disabled = true;
        try {
            const told = python ? await python.call("ask", { number: exhibit.number }) : exhibit.answers;
            if (mine === turn) show(told);
        } catch (error) {
            if (mine === turn) verdict.textContent = error.message;
        }
        go.disabled = false;
    }

    function show(told) {
        const right = room === exhibit.room;
        if (!placed.has(exhibit.number)) placed.set(exhibit.number, right);
        for (const button of buttons) {
            const name = button.textContent;
            button.className = name === exhibit.room ? "decide-right" : name === room ? "decide-wrong" : "";
        }
        const at = exhibit.step;
        const said = Number(step.value);
        verdict.textContent = (right ? `${exhibit.room}, as you said.` : `${exhibit.room}; you said ${room}.`)
            + (at === null ? "" : said === at ? ` In step ${at}, as you said.` : ` In step ${at}; you said ${said}.`);
        meaning.textContent = `${exhibit.room}: ${data.rooms[exhibit.room]}.`;
        answers.replaceChildren(...told.map(drawn));
        why.replaceChildren(el("b", {}, "Cause. "), `${exhibit.cause} `, el("b", {}, "Mend. "), exhibit.mend,
            told.some(({ how }) => how === "mini") ? "" : " No part of the mini engine has this bug: what is shown is vLLM's own code.");
        const named = [...placed.values()].filter(Boolean).length;
        const rooms = Object.keys(data.rooms).map((name) => [name, data.exhibits.filter((each) => each.room === name && placed.has(each.number))]);
        const filled = rooms.filter(([, there]) => there.length).map(([name, there]) => `${name} ${there.map(({ number }) => number).join(", ")}`);
        tally.textContent = `${placed.size} of ${data.exhibits.length} seen, ${named} named at the first try. In the rooms: ${filled.join("; ")}.`;
        go.textContent = python ? python.offer("Run it") : "Show what was recorded";
    }

    function drawn({ of, how, broken, step: at, lines }) {
        const has = `${broken ? "has it" : "does not have it"}${at === null ? "" : `, first in step ${at}`}`;
        return el("div", { "data-how": how, "data-broken": `${broken}` },
            el("p", {}, el("b", {}, of), `: ${has} `, el("span", { class: "museum-how" }, `(${HOW[how]})`)),
            el("ol", {}, lines.map((line) => el("li", { class: at !== null && line.startsWith(`step ${at}:`) ? "museum-at" : null }, line))));
    }

    box.append(labelled("A bug of vLLM", which), report, given,
        el("div", { class: "decide-ask" }, meaning, rooms, el("div", { class: "widget-form" }, when, go), verdict),
        python?.box ?? "", answers, why, tally);
    choose(exhibit);
    return box;
});
