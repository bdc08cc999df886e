/* The live engine: the course's own Python (course/site/live.py) in the page's worker, stepped and steered here.
 *
 * A run is a document with a frame per step; going back shows an older frame, a setting or a request that changes
 * replays the run. What is asked of Python goes one call after the other. Nothing global but `CourseLive`.
 */
"use strict";

const CourseLive = (() => {
    const { el } = CourseWidgets;
    const views = CourseLiveViews;
    const form = CourseLiveForm;
    const real = CourseReal;
    const MOST_STEPS = 500;
    const WHOLE_RUN = 10_000;

    /** Build the live engine in `host`; `given` is what the page holds of it. Returns { open, box }. */
    function build(host, given) {
        const session = window.CoursePlay.session();
        let run = null; // the document of course/site/live.py
        let place = 0; // the frame shown: 0 is before step 0
        let before = null; // the sums of the whole run before the last change
        let wish = null; // settings to be tried next
        let ahead = null; // a frame that is known here and not yet shown, because of a question about it
        let lost = true; // has the worker no run, or another one?
        let chain = Promise.resolve(); // what is asked for happens in its order
        let pending = 0;
        let timer = null;
        let busy = 0;

        // ------------------------------------------------------------ what stands there

        const box = el("section", { class: "widget-box live", "aria-label": "Live engine" });
        const button = (label, title, action) => el("button", { type: "button", title, "aria-label": title, onclick: action }, label);
        const first = button("|◀", "To the beginning", () => { pause(); show(0); });
        const back = button("◀", "One step back", () => { pause(); show(place - 1); });
        const next = el("button", { type: "button", class: "live-step", onclick: () => { pause(); inTurn(() => forward(true)); } }, "Step");
        const play = el("button", { type: "button", class: "live-play", onclick: () => (timer === null ? start() : pause()) }, "Play");
        const last = button("▶|", "Run to the end", () => { pause(); inTurn(toTheEnd); });
        const speed = el("select", { class: "widget-speed", "aria-label": "Speed", onchange: () => timer !== null && start() },
            [0.5, 1, 2, 4].map((times) => el("option", { value: times, selected: times === 1 ? "" : null }, `${times}×`)));
        const slider = el("input", { type: "range", min: 0, value: 0, "aria-label": "Step", oninput: () => { pause(); show(Number(slider.value)); } });
        const where = el("output", { class: "widget-place" });
        const reset = el("button", { type: "button", onclick: () => { pause(); inTurn(resetRun); } }, "Reset");
        const link = el("button", { type: "button", class: "live-link", onclick: () => copyLink() }, "Link to this state");
        const asks = el("input", { type: "checkbox", "data-setting": "predict" });
        asks.checked = true;
        const end = el("button", { type: "button", class: "live-stop", onclick: () => session.stop() }, "Stop");
        const bar = el("progress", { max: 1, value: 0, "aria-label": "Loading" });
        const barText = el("span", {});
        const loading = el("p", { class: "live-loading", hidden: "" }, bar, " ", barText, " ", end);
        const trouble = el("p", { class: "live-trouble", role: "alert" });
        const notice = el("p", { class: "live-notice", role: "status" });
        const said = el("p", { class: "film-say", "aria-live": "polite" });
        const asked = el("div", { class: "live-question", "aria-live": "polite" });
        const table = el("table", {});
        const scroll = el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "Requests by step; scrolls sideways" }, table);
        const parts = Object.fromEntries(["settings", "batch", "queues", "pool", "why", "texts", "requests"].map((name) =>
            [name, el("div", { class: `live-${name}-part` })]));
        const facts = el("dl", { class: "line-facts" });
        const vllm = real.build({ fetch: askReal, predicts: () => asks.checked, name: "mini_vllm",
            go: (to) => { pause(); show(to); } });
        const controls = el("div", { class: "widget-controls", role: "group", "aria-label": "Controls" },
            next, play, speed, first, back, last, slider, where);
        const hint = el("p", { class: "live-hint" }, "A row is a request, a column a step of the engine, a number the tokens it "
            + "computes. ", el("a", { href: `${given.up}GLOSSARY.html` }, "What the words mean"));
        const stage = el("div", { hidden: "" }, hint, parts.settings, controls, asked, said, scroll, CourseWidgets.sideways(scroll), views.legend(), parts.batch,
            el("div", { class: "live-columns" }, parts.queues, parts.pool),
            el("h4", {}, "Why this step is so"), parts.why, el("h4", {}, "Texts"), parts.texts, facts, vllm.box,
            el("details", { class: "live-edit" }, el("summary", {}, "Change the requests"), parts.requests),
            el("p", { class: "live-foot" }, link, reset, el("label", { class: "live-check" }, asks, " Ask me before a step"), notice));
        box.append(el("p", { class: "widget-title" }, "Live: mini_vllm, serving its shipped model in this page"), loading, trouble, stage);
        host.append(box);

        box.addEventListener("keydown", (event) => {
            const moves = { ArrowLeft: -1, ArrowRight: 1 };
            if (!(event.key in moves) || event.target.closest("input, select, .line-scroll")) return;
            event.preventDefault();
            event.stopPropagation();
            pause();
            if (moves[event.key] > 0) inTurn(() => forward(true));
            else show(place - 1);
        });

        // ------------------------------------------------------------ Python

        session.onprogress = ({ loaded, total, what }) => {
            bar.max = Math.max(total, given.bytes);
            bar.value = loaded;
            const done = (loaded / 1e6).toFixed(1);
            barText.textContent = `${done} of about ${(bar.max / 1e6).toFixed(0)} MB: ${what}`;
        };

        /** Call a function of course/site/live.py; null when it was refused, which then stands there. */
        async function ask(name, payload, module = "course.site.live") {
            busy += 1;
            const slow = setTimeout(() => waiting(true), run ? 400 : 0);
            try {
                const answer = await session.call("python", { module, function: name, arguments: payload });
                trouble.textContent = "";
                lost = false;
                return answer;
            } catch (error) {
                lost = lost || session.state === "idle"; // the worker ended, and its run with it
                trouble.textContent = said_of(error);
                return null;
            } finally {
                busy -= 1;
                clearTimeout(slow);
                if (!busy) waiting(false);
            }
        }

        /** The run as far as it has come, decided by a release of vLLM; null when it was refused. */
        async function askReal(release) {
            let told = null;
            pause();
            await inTurn(async () => {
                if (isLost() && !(await change(run, run.frames.length - 1))) return;
                told = await ask("ask", { release }, "course.site.live_real");
            }, Infinity);
            return told;
        }

        const isLost = () => lost || session.state === "idle";

        const said_of = (error) => (error.message === "stopped" ? "Stopped. Step goes on from here."
            : error.message.replace(/^ValueError: /, ""));

        function waiting(on) {
            loading.hidden = !on;
            if (on && session.state !== "loading") {
                bar.removeAttribute("value");
                barText.textContent = "The engine is running.";
            }
        }

        /** What `start` needs to make the run that is shown. */
        const described = (of) => ({ settings: of.settings, aborts: of.aborts || [],
            requests: of.requests.map(({ prompt, max_tokens, arrival, priority }) => ({ prompt, max_tokens, arrival, priority })) });

        /** Replay with other settings or requests, as far as the run had come or to `at`. */
        async function change(to, at = null) {
            const whole = at === null && run !== null && run.done;
            const wasAtEnd = whole && place === run.frames.length - 1;
            const steps = at === null ? (run ? run.frames.length - 1 : 0) : at;
            const made = await ask("start", { ...described(to), at: Math.min(whole ? WHOLE_RUN : steps, MOST_STEPS) });
            if (made) take(made, at !== null || wasAtEnd ? made.at : Math.min(place, made.at));
            else if (run) drawRequests(); // as they are
            return made !== null;
        }

        function take(made, at) {
            run = made;
            ahead = null;
            vllm.clear();
            asked.replaceChildren();
            stage.hidden = false;
            if (!parts.settings.contains(document.activeElement)) draw(); // not under the hand that drags
            show(at);
        }

        /** Do it after what was asked for before; of impatient clicks a few are kept. */
        function inTurn(action, most = 3) {
            if (pending >= most) return chain;
            pending += 1;
            chain = chain.then(action).catch((error) => { trouble.textContent = error.message; })
                .finally(() => { pending -= 1; });
            return chain;
        }

        /** Try settings; while one replay runs, only the newest wish waits. */
        function turn(settings) {
            wish = settings;
            inTurn(async () => {
                if (!wish) return;
                const to = wish;
                wish = null;
                const was = run.done ? run.frames.at(-1).counters : null;
                if (await change({ ...run, settings: to })) {
                    before = was || before;
                    show(place);
                }
            }, Infinity);
        }

        function resetRun() {
            before = null;
            return change({ ...given, aborts: [] }, 0).then(() => draw());
        }

        /** The next frame, from the history or from the engine; null at the end. */
        async function fetched() {
            if (place < run.frames.length - 1) return run.frames[place + 1];
            if (ahead) return ahead;
            if (run.done) return null;
            const at = run.frames.length;
            if (isLost()) {
                const made = await ask("start", { ...described(run), at });
                if (!made) return null;
                run.done = made.done;
                run.link = made.link;
                return made.frames[at] || null;
            }
            const more = await ask("step", { count: 1 });
            if (!more) return null;
            run.done = more.done;
            run.link = more.link;
            return more.frames[0] || null;
        }

        async function forward(mayAsk) {
            const isNew = place === run.frames.length - 1;
            const was = ahead;
            const frame = await fetched();
            if (!frame) return;
            if (isNew && mayAsk && asks.checked && !was) {
                const question = form.question(run.frames[place], frame);
                if (question) {
                    ahead = frame;
                    pose(question);
                    return;
                }
            }
            reveal(frame);
            if (mayAsk) asked.replaceChildren();
        }

        function reveal(frame) {
            if (place === run.frames.length - 1) run.frames.push(frame);
            ahead = null;
            vllm.clear();
            show(place + 1);
        }

        function pose(question) {
            const answer = (given_) => {
                const right = given_ === question.answer;
                const verdict = right ? "Right." : `Not this time: ${question.answer}.`;
                asked.replaceChildren(el("p", { class: right ? "live-right" : "live-wrong" }, `${verdict} ${question.because}`));
                if (ahead) reveal(ahead);
                next.focus();
            };
            asked.replaceChildren(el("p", {}, `Predict. ${question.ask} `), el("p", {},
                question.choices.map((choice) => el("button", { type: "button", onclick: () => answer(choice) }, choice)),
                el("small", {}, " or Step to go on")));
        }

        async function toTheEnd() {
            const at = run.frames.length - 1;
            if (!run.done || ahead) {
                const made = await ask("start", { ...described(run), at: MOST_STEPS });
                if (!made) return;
                take(made, at);
            }
            show(run.frames.length - 1);
        }

        async function endRequest(id) {
            if (isLost() && !(await change(run, run.frames.length - 1))) return;
            const made = await ask("abort", { request_id: id, at: place });
            if (made) take(made, made.at);
        }

        // ------------------------------------------------------------ playing

        function start() {
            clearInterval(timer);
            play.textContent = "Pause";
            asked.replaceChildren();
            timer = setInterval(async () => {
                if (pending) return;
                if (place >= run.frames.length - 1 && run.done && !ahead) pause();
                else await inTurn(() => forward(false));
            }, 1200 / Number(speed.value));
        }

        function pause() {
            clearInterval(timer);
            timer = null;
            play.textContent = "Play";
        }

        // ------------------------------------------------------------ showing

        /** The parts that only a change of the run changes. */
        function draw() {
            const open = parts.settings.querySelector("details")?.open;
            parts.settings.replaceChildren(...form.settings(run, (settings) => {
                pause();
                turn(settings);
            }));
            if (open) parts.settings.querySelector("details").open = true;
        }
        parts.settings.addEventListener("focusout", (event) => { // what was refused goes back to what is so
            if (run && !parts.settings.contains(event.relatedTarget)) inTurn(() => wish || draw(), Infinity);
        });

        function drawRequests() {
            parts.requests.replaceChildren(...form.requests(run, given.most, place, (requests) =>
                inTurn(() => change({ ...run, requests, aborts: [] }))));
        }

        function show(target) {
            place = Math.max(0, Math.min(run.frames.length - 1, target));
            const frame = run.frames[place];
            const steps = run.frames.length - 1;
            slider.max = steps;
            slider.value = place;
            where.textContent = place ? `step ${place - 1}, ${steps} done` : "before step 0";
            slider.setAttribute("aria-valuetext", where.textContent);
            box.dataset.place = place;
            first.disabled = back.disabled = place === 0;
            const over = run.done && !ahead;
            next.disabled = over && place === steps;
            last.disabled = over && place === steps;
            play.disabled = over && place === steps;
            if (over && place === steps) pause();
            said.textContent = views.sentence(run, frame) + (over && place === steps ? " Nothing is left to do." : "");
            table.replaceChildren(...views.timeline(run, place, (to) => { pause(); show(to); }));
            const now = table.querySelector(".line-now");
            if (now && scroll.scrollWidth > scroll.clientWidth) scroll.scrollLeft = now.offsetLeft - scroll.clientWidth / 2;
            parts.batch.replaceChildren(views.batch(run, frame));
            parts.queues.replaceChildren(...views.queues(run, frame, place, (id) => { pause(); inTurn(() => endRequest(id)); }));
            parts.pool.replaceChildren(...views.pool(run, frame));
            parts.why.replaceChildren(views.why(frame, given.source));
            parts.texts.replaceChildren(views.texts(run, frame, place));
            facts.replaceChildren(...views.counters(frame, over && place === steps ? before : null));
            if (!parts.requests.contains(document.activeElement)) drawRequests();
            vllm.show(place);
            notice.textContent = "";
        }
        parts.requests.addEventListener("focusout", (event) => {
            if (run && !parts.requests.contains(event.relatedTarget)) setTimeout(drawRequests);
        });

        // ------------------------------------------------------------ links

        async function copyLink() {
            const fragment = run.link.replace(/at=\d+$/, `at=${place}`);
            history.replaceState(null, "", `#${fragment}`);
            try {
                await navigator.clipboard.writeText(location.href);
                notice.textContent = "The address is copied.";
            } catch {
                notice.textContent = "The address of this page now leads here: copy it from the address bar.";
            }
        }

        /** Begin: with the page's own run, or with that of a link. */
        const open = (fragment = "") => {
            pause();
            return inTurn(() => begin(fragment), Infinity).then(() => run !== null);
        };

        async function begin(fragment) {
            const made = fragment ? await ask("open_link", { link: fragment }) : await ask("start", { ...described(given), at: 0 });
            if (made) take(made, made.at);
            else if (fragment && !run) {
                const why = trouble.textContent;
                if (await change({ ...given, aborts: [] }, 0)) trouble.textContent = `This link leads nowhere (${why}); here is the usual run.`;
            }
        }

        return { open, box };
    }

    return { build };
})();
