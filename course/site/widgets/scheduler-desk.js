/* An editable timeline of the scheduler: requests of chosen lengths, predicted step by step. The document is
 * that of course/site/widgets/scheduler_desk.py; views and settings are those of the live engine. What the reader changes is
 * run by the same Python in the page.
 */
"use strict";

CourseWidgets.mount("scheduler-desk", (data) => {
    const { el, svg } = CourseWidgets;
    const views = CourseLiveViews;
    const form = CourseLiveForm;
    const FIELDS = [["tokens", "prompt", 1, data.most.tokens], ["outputs", "outputs", 1, data.most.outputs],
        ["arrival", "from step", 0, 60], ["priority", "priority", -9, 9]];
    const session = window.CoursePlay?.ready ? window.CoursePlay.session() : null;
    const up = typeof path_to_root === "string" ? path_to_root : "";
    document.head.append(el("link", { rel: "stylesheet", href: `${up}book/widgets/live.css` }));

    let run = null; // the document shown
    let place = 0;
    let seen = 0; // the furthest frame shown: what lies behind it is asked about
    let wish = null; // {settings, requests} that the reader wants
    let works = false;
    let last = ""; // the last fallback question's answer

    const box = el("section", { class: "widget-box live decide", "aria-label": "The scheduler, step by step" });
    const button = (label, title, action) => el("button", { type: "button", title, "aria-label": title, onclick: action }, label);
    const next = el("button", { type: "button", class: "live-step", onclick: () => forward() }, "Step");
    const first = button("|◀", "To the beginning", () => show(0));
    const back = button("◀", "One step back", () => show(place - 1));
    const end = button("▶|", "To the end", () => { asked.replaceChildren(); show(run.frames.length - 1); });
    const slider = el("input", { type: "range", min: 0, value: 0, "aria-label": "Step", oninput: () => show(Number(slider.value)) });
    const where = el("output", { class: "widget-place" });
    const asks = el("input", { type: "checkbox", "data-input": "predict" });
    asks.checked = true;
    const asked = el("div", { class: "live-question", "aria-live": "polite" });
    const title = el("p", { class: "widget-title" });
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const missing = el("p", { class: "desk-missing", role: "status" });
    const table = el("table", {});
    const scroll = el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "Requests by step; scrolls sideways", onscroll: () => point() }, table);
    const parts = Object.fromEntries(["batch", "queues", "pool", "why", "settings", "requests"].map((name) => [name, el("div", {})]));
    const arrow = svg("svg", { class: "desk-arrow", "aria-hidden": "true" });
    const stage = el("div", { class: "desk-stage" }, scroll, CourseWidgets.sideways(scroll), views.legend(), parts.batch,
        el("div", { class: "live-columns" }, parts.queues, parts.pool), arrow);
    const trouble = el("p", { class: "live-trouble", role: "alert" });
    const bar = el("progress", { max: 1, value: 0, "aria-label": "Loading" });
    const barText = el("span", {});
    const loading = el("p", { class: "live-loading", hidden: "" }, bar, " ", barText, " ",
        el("button", { type: "button", onclick: () => session.stop() }, "Stop"));
    const go = el("button", { type: "button", class: "desk-run", onclick: () => apply() },
        `Run my requests (loads ${Math.round(data.bytes / 1e6)} MB)`);
    const edit = el("details", { class: "live-edit", hidden: session ? null : "" }, el("summary", {}, "Write your own: requests, blocks, budget, slots, policy"),
        parts.requests, parts.settings, el("p", {}, go), loading, trouble);

    // ------------------------------------------------------------ the run

    function take(made, at) {
        for (const frame of made.frames) {
            frame.why = frame.why.map((each) => ({ ...each, ...made.rules[each.name] }));
            frame.texts = Object.fromEntries([...frame.waiting, ...Object.keys(frame.cells)].map((id) => [id, ""]));
        }
        run = made;
        const { budget, blocks, block_size: size, slots } = run.settings;
        title.textContent = `${views.number(run.requests.length, "request")}: ${views.number(budget, "token")} a step, `
            + `${views.number(blocks, "block")} of ${views.number(size, "token")}, ${views.number(slots, "slot")}. Predict each step`;
        asked.replaceChildren();
        show(Math.min(at, run.frames.length - 1));
    }

    /** What the engine says to the reader's wish; of wishes that come while it runs, the newest. */
    async function apply() {
        if (works) return;
        works = true;
        go.disabled = true;
        const slow = setTimeout(() => { loading.hidden = false; }, session.state === "ready" ? 400 : 0);
        session.onprogress = ({ loaded, total, what }) => {
            bar.max = Math.max(total, data.bytes);
            bar.value = loaded;
            barText.textContent = `${(loaded / 1e6).toFixed(1)} of about ${(bar.max / 1e6).toFixed(0)} MB: ${what}`;
        };
        try {
            for (let tried = null; tried !== wish;) {
                tried = wish;
                const made = await session.call("python", { module: "course.site.widgets.scheduler_desk", function: "play", arguments: tried });
                trouble.textContent = "";
                seen = Math.min(seen, made.frames.length - 1);
                take({ ...data, ...made }, place);
            }
            go.hidden = true;
        } catch (error) {
            trouble.textContent = error.message === "stopped" ? "Stopped." : error.message.replace(/^\w*Error: /, "");
        }
        clearTimeout(slow);
        loading.hidden = true;
        go.disabled = works = false;
    }

    function want(change) {
        wish = { ...wish, ...change };
        if (go.hidden) apply();
    }

    // ------------------------------------------------------------ the requests

    const chip = (i) => String.fromCharCode(65 + i);
    function drawRequests() {
        const set = (i, name, value) => want({ requests: wish.requests.map((one, j) => (i === j ? { ...one, [name]: value } : one)) });
        const change = (requests) => { want({ requests }); drawRequests(); };
        const field = (one, i, [name, words, least, most]) => {
            const input = el("input", { type: "number", min: least, max: most, value: one[name], "data-field": name,
                "aria-label": `${words} of ${chip(i)}`,
                onchange: () => {
                    input.value = Math.max(least, Math.min(most, Math.round(Number(input.value) || 0)));
                    set(i, name, Number(input.value));
                } });
            return el("label", {}, el("span", {}, words), input);
        };
        parts.requests.replaceChildren(
            el("ul", { class: "desk-requests" }, wish.requests.map((one, i) => el("li", { "data-id": chip(i) },
                el("b", { class: `live-chip live-r${i}` }, chip(i)), FIELDS.map((each) => field(one, i, each)),
                wish.requests.length > 1 ? button("×", `Remove ${chip(i)}`, () => change(wish.requests.filter((_, j) => j !== i))) : null))),
            wish.requests.length < data.most.requests ? el("p", {}, el("button", { type: "button",
                onclick: () => change([...wish.requests, { tokens: 12, outputs: 6, arrival: Math.max(0, place), priority: 0 }]) }, "Add a request")) : "");
    }

    // ------------------------------------------------------------ predicting

    /** Of the live engine's questions, or how many tokens the step computes, if that is not as before. */
    function question(before, after) {
        const found = form.question(before, after);
        if (found) return found;
        const answer = `${after.total.scheduled}`;
        if (!before.total || answer === last) return null;
        last = answer;
        const ids = after.running.length;
        const others = [before.total.scheduled, ids + 1, after.total.budget, Math.max(1, ids - 1), after.total.scheduled + 3];
        const choices = [...new Set([answer, ...others.map(String)])].slice(0, 4).sort((a, b) => a - b);
        return { ask: "How many tokens does the next step compute, all requests together?", choices, answer,
            because: views.sentence(run, after) };
    }

    function forward() {
        if (place >= run.frames.length - 1) return;
        const posed = asks.checked && place === seen && !asked.querySelector("button") ? question(run.frames[place], run.frames[place + 1]) : null;
        if (!posed) {
            asked.replaceChildren();
            show(place + 1);
            return;
        }
        const answer = (given) => {
            const right = given === posed.answer;
            show(place + 1);
            asked.replaceChildren(el("p", { class: right ? "live-right" : "live-wrong" },
                `${right ? "Right." : `Not this time: ${posed.answer}.`} ${posed.because}`));
            next.focus();
        };
        asked.replaceChildren(el("p", {}, `Predict. ${posed.ask} `), el("p", {},
            posed.choices.map((each) => el("button", { type: "button", "data-choice": each, onclick: () => answer(each) }, each)),
            el("small", {}, " or Step to go on")));
    }

    // ------------------------------------------------------------ showing

    function show(target) {
        const was = place;
        place = Math.max(0, Math.min(run.frames.length - 1, target));
        if (place < was) asked.replaceChildren();
        seen = Math.max(seen, place);
        const frame = run.frames[place];
        const steps = run.frames.length - 1;
        slider.max = steps;
        slider.value = place;
        where.textContent = place ? `step ${place - 1} of ${steps - 1}` : "before step 0";
        slider.setAttribute("aria-valuetext", where.textContent);
        box.dataset.place = place;
        first.disabled = back.disabled = place === 0;
        next.disabled = end.disabled = place === steps;
        said.textContent = views.sentence(run, frame);
        const known = { ...run, frames: run.frames.slice(0, seen + 1) }; // nothing of what is not yet shown
        table.replaceChildren(...views.timeline(known, place, show));
        const now = table.querySelector(".line-now");
        if (now && scroll.scrollWidth > scroll.clientWidth) scroll.scrollLeft = now.offsetLeft - scroll.clientWidth / 2;
        parts.batch.replaceChildren(frame.total ? views.batch(run, frame) : "");
        parts.queues.replaceChildren(...views.queues(run, frame, place, () => {}));
        for (const each of parts.queues.querySelectorAll(".live-abort")) each.remove();
        parts.pool.replaceChildren(...views.pool(run, frame));
        parts.why.replaceChildren(views.why(frame, data.source));
        missing.textContent = frame.taken.map(({ victim, to, blocks }) => (to === victim
            ? `The arrow: ${victim} lacked a block and was last itself; all of its own went back.`
            : `The arrow: ${to} lacked a block; it now holds ${blocks.length ? `block ${blocks.join(", ")}` : "one"}, which was ${victim}'s.`)).join(" ");
        missing.dataset.taken = JSON.stringify(frame.taken);
        point();
    }

    /** From the × of a preemption to the block that was missing. */
    function point() {
        arrow.replaceChildren();
        const { taken } = run.frames[place];
        const base = stage.getBoundingClientRect();
        const room = scroll.getBoundingClientRect();
        if (!taken.length || !base.width) return;
        const lines = taken.flatMap(({ victim, blocks }) => {
            const from = table.querySelector(`tr[data-request="${victim}"] td.line-now`)?.getBoundingClientRect();
            const block = blocks.length ? parts.pool.querySelector(`[data-id="${blocks[0]}"]`) : parts.pool.querySelector("h4");
            if (!from || !block || from.left < room.left || from.right > room.right + 1) return [];
            block.classList.toggle("desk-lost", blocks.length > 0);
            const to = block.getBoundingClientRect();
            const [x1, y1] = [from.left + from.width / 2 - base.left, from.bottom - base.top - 3];
            const [x2, y2] = [to.left + Math.min(to.width / 2, 40) - base.left, to.top - base.top - 2];
            const bend = (y1 + y2) / 2;
            return [svg("path", { d: `M${x1} ${y1}C${x1} ${bend} ${x2} ${bend} ${x2} ${y2 - 7}` }),
                svg("path", { class: "desk-head", d: `M${x2 - 5} ${y2 - 9}L${x2 + 5} ${y2 - 9}L${x2} ${y2}Z` })];
        });
        arrow.setAttribute("viewBox", `0 0 ${base.width} ${base.height}`);
        arrow.replaceChildren(...lines);
    }
    new ResizeObserver(() => point()).observe(stage);

    box.addEventListener("keydown", (event) => {
        const moves = { ArrowLeft: -1, ArrowRight: 1 };
        if (!(event.key in moves)) return;
        event.stopPropagation();
        if (event.target.closest("input, select, .line-scroll")) return;
        event.preventDefault();
        if (moves[event.key] > 0) forward();
        else show(place - 1);
    });
    box.append(title, el("div", { class: "widget-controls", role: "group", "aria-label": "Controls" }, next, first, back, end, slider, where),
        asked, said, stage, missing, el("details", { class: "live-edit" }, el("summary", {}, "Why this step is so"), parts.why), edit,
        el("p", {}, el("label", { class: "live-check" }, asks, " Ask me before a step")));
    wish = { settings: { ...data.settings }, requests: data.requests.map(({ tokens, outputs, arrival, priority }) => ({ tokens, outputs, arrival, priority })) };
    take(data, 0);
    parts.settings.replaceChildren(...form.settings(data, (settings) => want({ settings })));
    parts.settings.querySelector("details").open = true; // the policy is there
    drawRequests();
    return box;
});
