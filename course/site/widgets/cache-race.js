/* Generation with a KV cache against generation without one. The document is that of course/site/widgets/cache_race.py:
 * a race's tokens and positions. Seconds are measured in this page alone, by `advance` there. */
"use strict";

CourseWidgets.mount("cache-race", (data) => {
    const { el, count, labelled, questions, inPage } = CourseWidgets;
    const engine = inPage("course.site.widgets.cache_race", data.bytes);
    const LANES = { with: "with the cache", without: "without it" };
    const still = matchMedia("(prefers-reduced-motion: reduce)");
    const box = el("section", { class: "widget-box race", "aria-label": "With the cache against without it" });
    let running = 0; // the number of the race that goes on
    let state = null;

    const text = (ids) => new TextDecoder().decode(new Uint8Array(ids.filter((id) => id < 256)));
    const lanes = Object.fromEntries(Object.entries(LANES).map(([lane, words]) => {
        const said = el("span", { class: "spec-kept" }), asked = el("span", {});
        const bar = el("span", { class: "race-bar" });
        const facts = el("dl", { class: "line-facts" });
        const node = el("div", { class: "race-lane", "data-lane": lane }, el("strong", {}, words),
            el("p", { class: "spec-text" }, asked, said), el("div", { class: "race-track" }, bar), facts);
        return [lane, { node, said, asked, bar, facts }];
    }));
    const prompt = el("input", { type: "text", maxlength: data.most.bytes, value: text(data.race.prompt), spellcheck: "false", "data-input": "prompt" });
    const tokens = el("input", { type: "range", min: 4, max: data.most.tokens, step: 4, value: data.race.num_tokens, "data-input": "tokens",
        oninput: () => { length.textContent = tokens.value; } });
    const length = el("output", {}, tokens.value);
    const replay = el("button", { type: "button", onclick: () => again() }, "Race by positions");
    const live = engine ? el("button", { type: "button", onclick: () => measured() }, "") : null;
    const trouble = el("p", { class: "run-trouble", role: "alert" });
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });

    const fresh = (race) => ({ ...race, lanes: Object.fromEntries(Object.keys(LANES).map((lane) =>
        [lane, { tokens: [], positions: 0, steps: 0, seconds: null }])) });

    function moved(lane, [token, positions], seconds = null) {
        const own = state.lanes[lane];
        own.tokens.push(token);
        own.steps += 1;
        own.positions += positions;
        if (seconds !== null) own.seconds += seconds;
        draw();
    }

    function draw() {
        for (const [lane, { said, asked, bar, facts, node }] of Object.entries(lanes)) {
            const own = state.lanes[lane];
            asked.textContent = text(state.prompt);
            said.textContent = text(own.tokens);
            bar.style.width = `${100 * own.steps / state.num_tokens}%`;
            node.dataset.positions = own.positions;
            node.dataset.steps = own.steps;
            const shown = { steps: `${own.steps} of ${state.num_tokens}`, "positions computed": count(own.positions),
                ...(own.seconds === null ? {} : { "measured here": `${(1000 * own.seconds).toFixed(0)} ms` }) };
            facts.replaceChildren(...Object.entries(shown).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
        }
    }

    function conclude() {
        const { with: kept, without } = state.lanes;
        const same = kept.tokens.join() === without.tokens.join();
        const times = (a, b) => `${(a / b).toFixed(1)} times`;
        verdict.textContent = `${same ? "The same text" : "Different texts"}; without the cache ${times(without.positions, kept.positions)} the positions`
            + (kept.seconds === null ? "." : ` and ${times(without.seconds, kept.seconds)} the time, in this page.`);
        verdict.dataset.same = same;
    }

    /** The recorded race: both lanes compute as many positions in a tick. */
    async function again(at = null) {
        const mine = (running += 1);
        state = fresh(data.race);
        verdict.textContent = "";
        draw();
        const left = Object.fromEntries(Object.keys(LANES).map((lane) => [lane, data.race[lane].map((step) => [...step])]));
        const credit = { with: 0, without: 0 };
        const PER_TICK = 6;
        while (left.with.length || left.without.length) {
            if (at === null && !still.matches) await new Promise((resolve) => setTimeout(resolve, 40));
            if (mine !== running) return;
            for (const lane of Object.keys(LANES)) {
                credit[lane] += PER_TICK;
                while (left[lane].length && left[lane][0][1] <= credit[lane]) {
                    const step = left[lane].shift();
                    credit[lane] -= step[1];
                    moved(lane, step);
                }
            }
        }
        conclude();
    }

    /** A race of the reader's own: whoever has used less time so far makes the next step. */
    async function measured() {
        const mine = (running += 1);
        live.disabled = replay.disabled = true;
        trouble.textContent = verdict.textContent = "";
        try {
            state = fresh(await engine.call("start", { prompt: prompt.value, num_tokens: Number(tokens.value) }));
            for (const own of Object.values(state.lanes)) own.seconds = 0;
            draw();
            const done = new Set();
            while (done.size < 2 && mine === running) {
                const lane = Object.keys(LANES).filter((each) => !done.has(each))
                    .sort((a, b) => state.lanes[a].seconds - state.lanes[b].seconds)[0];
                const step = await engine.call("advance", { lane });
                moved(lane, [step.token, step.positions], step.seconds);
                if (step.done) done.add(lane);
            }
            conclude();
        } catch (error) {
            trouble.textContent = error.message;
        }
        live.disabled = replay.disabled = false;
        live.textContent = engine.offer("Race on a clock");
    }

    const posed = questions(data.questions, "Race", () => again(0));

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    if (engine) live.textContent = engine.offer("Race on a clock");
    box.append(el("p", { class: "widget-title" }, "One text twice: with the KV cache, and without"), ...posed,
        el("div", { class: "race-lanes" }, Object.values(lanes).map(({ node }) => node)), verdict,
        el("div", { class: "race-form" }, replay, ...(engine ? [labelled("Your prompt", prompt), labelled("Tokens", tokens, length), live] : [])),
        ...(engine ? [engine.box] : []), trouble);
    state = fresh(data.race);
    draw();
    return box;
});
