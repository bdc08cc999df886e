/* The playground: a run of the reader's, decided by a release of vLLM and by mini_vllm, both drawn. The document is that of
 * course/site/widgets/vllm_live.py; views and settings are those of the live engine.
 */
"use strict";

CourseWidgets.mount("vllm-live", (data) => {
    const { el } = CourseWidgets;
    const [views, form, real] = [CourseLiveViews, CourseLiveForm, CourseReal];
    const LINK = /^#(vllm=.+)/;
    const SIDES = ["real", "ours"];
    const python = CourseWidgets.inPage("course.site.vllm_live", data.bytes);
    const up = typeof path_to_root === "string" ? path_to_root : "";
    document.head.append(el("link", { rel: "stylesheet", href: `${up}book/widgets/live.css` }));

    const box = el("section", { class: "widget-box live", "aria-label": "vLLM's scheduler, live" });
    if (!python || !data.releases.length) {
        box.append(el("p", { class: "widget-title" }, "This copy of the site cannot ask vLLM"),
            el("p", {}, "It was built without ", python ? "vLLM's source" : "what runs Python in a page", ". In a checkout of the course, "
                + "these commands build a site that can:"),
            el("pre", {}, el("code", {}, "uv run course upstream fetch\nuv run course book runtime\nuv run --extra book course book serve")),
            document.querySelector('[data-widget="vllm-live"] img')?.cloneNode() ?? null);
        return box;
    }

    const numbered = (requests) => requests.map((one, place) => ({ ...one, id: String.fromCharCode(65 + place) }));
    let wish = { settings: data.settings, bounds: data.bounds, requests: numbered(data.requests), aborts: [] };
    let told = null; // what both decided
    let place = 0; // the frame shown: 0 is before step 0
    let limit = Infinity; // the last frame that may be shown, while a question about the next stands

    // ------------------------------------------------------------ what the reader writes

    const parts = Object.fromEntries(["settings", "requests"].map((name) => [name, el("div", { class: `live-${name}-part` })]));
    const release = el("select", { "aria-label": "Release of vLLM", onchange: () => { drawBeside(); want({}); } },
        data.releases.map((each) => el("option", { selected: each === data.pin ? "" : null }, each)));
    const beside = el("select", { "aria-label": "Rules of mini_vllm", onchange: () => want({}) });
    const run = el("button", { type: "button", class: "live-step", onclick: () => decide() }, python.offer("Let both decide"));
    const trouble = el("p", { class: "live-trouble", role: "alert" });

    /** The pin's rules and, where they are proved, those of the release that is asked. */
    function drawBeside(now = release.value) {
        const rules = [...new Set([data.pin, release.value])].filter((each) => data.proved.includes(each));
        beside.replaceChildren(...rules.map((each) => el("option", { value: each, selected: each === now ? "" : null },
            each === data.pin ? `as ${each}, the pin` : `with the rules of ${each}`)));
    }

    function drawForms() {
        parts.settings.replaceChildren(...form.settings(wish, (settings) => {
            const turned = settings.policy !== wish.settings.policy;
            want({ settings });
            if (turned) drawRequests();
        }));
        drawRequests();
    }

    function drawRequests() {
        parts.requests.replaceChildren(...form.requests(wish, data.most, 0, (requests) => {
            const other = requests.length !== wish.requests.length;
            want({ requests: numbered(requests), aborts: [] });
            if (other) drawRequests();
        }));
    }

    /** Another run than the one that is shown. */
    function want(change) {
        wish = { ...wish, ...change };
        told = null;
        stage.hidden = true;
        asked.replaceChildren();
        verdict.textContent = "";
    }

    // ------------------------------------------------------------ what both decide

    async function decide(link = "") {
        run.disabled = true;
        trouble.textContent = "";
        try {
            const requests = wish.requests.map(({ prompt, max_tokens, arrival, priority }) => ({ prompt, max_tokens, arrival, priority }));
            const made = link ? await python.call("open_link", { link })
                : await python.call("play", { settings: wish.settings, requests, aborts: wish.aborts, release: release.value, beside: beside.value });
            wish = { settings: made.settings, bounds: made.bounds, requests: numbered(made.requests), aborts: made.aborts };
            if (link) {
                release.value = made.release;
                drawBeside(made.beside);
                drawForms();
            }
            told = made;
            history.replaceState(null, "", `#${made.link}`);
            pose();
        } catch (error) {
            want({});
            trouble.textContent = error.message;
        }
        run.textContent = python.offer("Let both decide");
        run.disabled = false;
    }

    /** Where the first question is worth most: who gives way, who is kept waiting, who gets how much. */
    function question() {
        const alike = told.difference ? told.difference.step : Infinity;
        let best = null;
        for (let at = 0; at + 1 < told.real.length; at += 1) {
            const posed = form.question(told.real[at], { ...told.real[at + 1], why: at < alike ? told.ours[at + 1]?.why ?? [] : [] });
            if (!posed) continue;
            const rank = told.real[at + 1].total.preempted.length ? 0 : posed.answer === "no" ? 1 : 2;
            if (!best || rank < best.rank) best = { ...posed, at, rank };
        }
        return best;
    }

    function pose() {
        const posed = question();
        const name = `vLLM ${told.release}`;
        const parted = { ask: `Does ${name} decide each of ${told.real.length - 1} steps as ${ours()} does?`, choices: ["yes", "no"],
            answer: told.difference ? "no" : "yes", because: "", at: 0 };
        const { ask, choices, answer, because, at } = posed || parted;
        const said = (guess) => {
            asked.replaceChildren(el("p", { class: guess === answer ? "live-right" : "live-wrong" },
                `${guess === answer ? "Right" : guess ? "Not this time" : "So it is"}: ${answer}. ${because}`));
            reveal(told.difference ? told.difference.step + 1 : at + 1);
        };
        limit = at;
        verdict.textContent = "";
        asked.replaceChildren(el("p", {}, `Predict step ${at} of ${name}. ${ask} `), el("p", {},
            choices.map((choice) => el("button", { type: "button", onclick: () => said(choice) }, choice)),
            el("button", { type: "button", onclick: () => said("") }, "Show me")));
        stage.hidden = false;
        show(at);
        asked.scrollIntoView({ block: "nearest" });
    }

    const ours = () => (told.beside === data.pin ? "mini_vllm" : `mini_vllm with the rules of ${told.beside}`);

    function reveal(at) {
        limit = Infinity;
        verdict.textContent = real.verdict({ ...told, steps: told.real.slice(1) }, ours());
        verdict.classList.toggle("real-differs", told.difference !== null);
        show(at);
    }

    // ------------------------------------------------------------ both, step by step

    const button = (label, title, action) => el("button", { type: "button", title, "aria-label": title, onclick: action }, label);
    const first = button("|◀", "To the beginning", () => show(0));
    const back = button("◀", "One step back", () => show(place - 1));
    const next = button("▶", "One step on", () => show(place + 1));
    const last = button("▶|", "To the end", () => show(Infinity));
    const slider = el("input", { type: "range", min: 0, value: 0, "aria-label": "Step", oninput: () => show(Number(slider.value)) });
    const where = el("output", { class: "widget-place" });
    const asked = el("div", { class: "live-question", "aria-live": "polite" });
    const verdict = el("p", { class: "real-verdict", role: "status" });
    const notice = el("p", { class: "live-notice", role: "status" });
    const sides = SIDES.map((side) => {
        const table = el("table", {});
        const scroll = el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": `Requests by step, ${side === "real" ? "vLLM" : "mini_vllm"}; scrolls sideways` }, table);
        return { side, table, scroll, title: el("h4", {}), state: el("div", { "data-side": side }) };
    });
    const stage = el("div", { hidden: "" },
        el("div", { class: "widget-controls", role: "group", "aria-label": "Controls" }, first, back, next, last, slider, where),
        asked, verdict, sides.map(({ title, scroll }) => [title, scroll, CourseWidgets.sideways(scroll)]), views.legend(),
        el("div", { class: "vllm-pair" }, sides.map(({ state }) => state)),
        el("p", { class: "live-foot" }, el("button", { type: "button", onclick: () => copyLink() }, "Copy the link to this run"), notice));

    const FACTS = [["running", ({ running }) => running], ["waiting", ({ waiting }) => waiting],
        ["block tables", ({ pool }) => pool.tables], ["free queue, next out first", ({ pool }) => pool.free]];

    function show(target) {
        const end = Math.min(limit, Math.max(told.real.length, told.ours.length) - 1);
        place = Math.max(0, Math.min(end, target));
        slider.max = end;
        slider.value = place;
        where.textContent = place ? `step ${place - 1}` : "before step 0";
        slider.setAttribute("aria-valuetext", where.textContent);
        box.dataset.place = place;
        first.disabled = back.disabled = place === 0;
        next.disabled = last.disabled = place === end;
        const frames = SIDES.map((side) => told[side][place] ?? null);
        const names = [`vLLM ${told.release}`, ours()];
        for (const [index, { side, table, scroll, title, state }] of sides.entries()) {
            const shown = { ...wish, frames: told[side].slice(0, limit === Infinity ? undefined : limit + 1) };
            const frame = frames[index];
            title.textContent = names[index];
            table.replaceChildren(...views.timeline(shown, place, show));
            if (limit === Infinity && told.difference) table.tHead.rows[0].cells[told.difference.step + 1]?.classList.add("vllm-parts");
            const now = table.querySelector(".line-now");
            if (now && scroll.scrollWidth > scroll.clientWidth) scroll.scrollLeft = now.offsetLeft - scroll.clientWidth / 2;
            state.replaceChildren(el("h4", {}, names[index]), ...(frame ? drawn(shown, frame, frames[1 - index])
                : [el("p", { class: "film-none" }, "has nothing left to do")]));
        }
        notice.textContent = "";
    }

    function drawn(shown, frame, other) {
        return [
            el("p", { class: "film-say" }, frame.total ? views.sentence(shown, frame) : "Nothing is decided yet."),
            views.batch(shown, frame),
            ...views.queues(shown, frame, place, (id) => { want({ aborts: [...wish.aborts, [place, id]] }); decide(); }),
            ...views.pool(shown, frame),
            el("dl", { class: "vllm-facts" }, FACTS.map(([label, of]) => [el("dt", {}, label),
                el("dd", { class: other && real.text(of(frame)) !== real.text(of(other)) ? "real-other" : null }, real.text(of(frame)))])),
        ];
    }

    async function copyLink() {
        try {
            await navigator.clipboard.writeText(location.href);
            notice.textContent = "The address is copied.";
        } catch {
            notice.textContent = "The address of this page leads here: copy it from the address bar.";
        }
    }

    // ------------------------------------------------------------ begin

    drawBeside();
    drawForms();
    box.append(el("p", { class: "widget-title" }, "Your run, decided by vLLM's own scheduler and by mini_vllm"),
        el("h4", {}, "Requests"), parts.requests, el("h4", {}, "Knobs"), parts.settings,
        el("p", { class: "live-foot" }, el("label", {}, "vLLM ", release), el("label", {}, "beside mini_vllm, ", beside), run),
        python.box, trouble, stage);
    const open = () => { if (LINK.test(location.hash)) decide(LINK.exec(location.hash)[1]); };
    open();
    window.addEventListener("hashchange", open);
    return box;
});
