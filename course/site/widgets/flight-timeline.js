/* The page of recordings: a recording of a vLLM server, dropped or chosen, as queues and plans over its steps, and why each
 * request got what it got. The document is that of course/site/widgets/flight_timeline.py; what is drawn of a file is what
 * course/site/recordings.py says of it, in this page's Python. No file leaves the page.
 */
"use strict";

CourseWidgets.mount("flight-timeline", (data) => {
    const { el, svg, count, plural, labelled } = CourseWidgets;
    const python = CourseWidgets.inPage("course.site.recordings", data.bytes);
    const COLUMNS = 40;
    const SHOWN_ROWS = 60;
    const LANES = [["tokens", "tokens of the step", "flight-tokens"], ["running", "requests that run", "flight-running"],
        ["waiting", "requests that wait", "flight-waiting"], ["free", "free blocks", "flight-free"]];
    const LANE = 26; // units of height
    const room = CourseWidgets.room(760, () => drawOverview());
    let told = data.sample;
    let from = 0; // the first step of the table
    let chosen = null; // the request whose reasons stand below

    const box = el("section", { class: "widget-box flight", "aria-label": "A recording of a server" });
    const title = el("p", { class: "widget-title" });
    const facts = el("p", { class: "film-say" });
    const notice = el("p", { class: "run-trouble", role: "alert" });
    const overview = el("div", { class: "flight-overview" });
    const slider = el("input", { type: "range", min: 0, value: 0, "aria-label": "First step of the table", oninput: () => move(Number(slider.value)) });
    const where = el("output", { class: "widget-place" });
    const table = el("table", {});
    const scroll = el("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "Requests by step; scrolls sideways" }, table);
    const more = el("p", { class: "film-none" });
    const who = el("select", { "aria-label": "Request", onchange: () => choose(who.value, true) });
    const reasons = el("ol", { class: "flight-why" });
    const other = el("select", { "aria-label": "Compare its prompt with", onchange: () => compare() });
    const parts = el("p", { class: "flight-parts", role: "status" });

    // ------------------------------------------------------------ what is opened

    const input = el("input", { type: "file", multiple: "", accept: ".jsonl,.gz", class: "sr", id: "flight-file", onchange: () => read([...input.files]) });
    const pick = el("label", { class: "flight-drop", for: "flight-file" }, "Drop a recording here, or choose its file. It stays in this page.");
    const halt = (event) => event.preventDefault();
    pick.addEventListener("dragover", halt);
    pick.addEventListener("drop", (event) => { halt(event); read([...event.dataTransfer.files]); });
    if (!python) pick.textContent = "This copy of the site shows the sample only: it was built without what runs Python in a page (course book runtime).";

    const base64 = (file) => new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve([file.name, reader.result.slice(reader.result.indexOf(",") + 1)]);
        reader.onerror = () => reject(new Error(`${file.name}: the browser cannot read it`));
        reader.readAsDataURL(file);
    });

    async function read(files) {
        if (!python || !files.length) return;
        notice.textContent = "";
        try {
            const size = files.reduce((sum, file) => sum + file.size, 0);
            if (size > data.most.bytes) {
                throw new Error(`${files[0].name}: ${count(size)} bytes; a page opens at most ${data.most.bytes / 2 ** 20} MiB. course why reads any.`);
            }
            show(await python.call("open_files", { files: await Promise.all(files.map(base64)) }));
        } catch (error) {
            notice.textContent = error.message;
        }
        input.value = "";
    }

    // ------------------------------------------------------------ all steps at once

    const steps = () => told.totals.tokens.length;

    function drawOverview() {
        const wide = room();
        const high = LANES.length * LANE;
        const x = (step) => (step * wide) / Math.max(steps(), 1);
        const lanes = LANES.map(([name, words, look], lane) => {
            const values = told.totals[name];
            const most = Math.max(1, ...values);
            const bottom = (lane + 1) * LANE - 2;
            const path = values.map((value, step) => `V${(bottom - (value / most) * (LANE - 5)).toFixed(1)}H${x(step + 1).toFixed(1)}`).join("");
            return svg("path", { class: look, d: `M0 ${bottom}${path}V${bottom}Z` });
        });
        const evicted = told.totals.preempted.flatMap((number, step) => (number ? [svg("path", { class: "flight-preempted", d: `M${x(step + 0.5).toFixed(1)} 0V${high}` })] : []));
        const frame = svg("rect", { class: "flight-window", x: x(from), y: 0, width: Math.max(3, x(Math.min(COLUMNS, steps()))), height: high });
        const lost = told.totals.preempted.reduce((sum, number) => sum + number, 0);
        const drawing = svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", onclick: (event) => {
            const edge = drawing.getBoundingClientRect();
            move(Math.round(((event.clientX - edge.left) / edge.width) * steps() - COLUMNS / 2));
        }, "aria-label": `${plural(steps(), "step")}, ${plural(told.requests.length, "request")}, ${plural(lost, "preemption")}` }, lanes, evicted, frame);
        overview.replaceChildren(drawing, el("p", { class: "widget-legend" },
            LANES.map(([name, words, look]) => el("span", {}, el("i", { class: look, "aria-hidden": "true" }), `${words}, at most ${count(Math.max(0, ...told.totals[name]))}`)),
            el("span", {}, el("i", { class: "flight-preempted", "aria-hidden": "true" }), `${plural(lost, "preemption")}`)));
        overview.frame = frame;
        overview.x = x;
    }

    // ------------------------------------------------------------ some steps, request by request

    function move(target) {
        from = Math.max(0, Math.min(steps() - COLUMNS, target));
        drawTable();
    }

    const cellAt = (request, step) => request.cells.find(([first, last]) => first <= step && step <= last);

    function drawTable() {
        const end = Math.min(steps(), from + COLUMNS);
        slider.max = Math.max(0, steps() - COLUMNS);
        slider.value = from;
        const when = told.times.length > from ? `, ${told.times[from].toFixed(2)} s` : "";
        where.textContent = `steps ${from} to ${end - 1}${when}`;
        slider.setAttribute("aria-valuetext", where.textContent);
        box.dataset.from = from;
        overview.frame?.setAttribute("x", overview.x(from));
        const columns = Array.from({ length: end - from }, (_, place) => from + place);
        const there = told.requests.filter(({ cells }) => cells.some(([first, last]) => first < end && last >= from));
        const head = el("tr", {}, el("th", { scope: "col" }, "step"), columns.map((step) => el("th", { scope: "col", class: "line-step" }, `${step}`)));
        const rows = there.slice(0, SHOWN_ROWS).map((request) => el("tr", { "data-request": request.id },
            el("th", { scope: "row" }, el("button", { type: "button", class: request.id === chosen ? "flight-chosen" : null, onclick: () => choose(request.id) }, request.id)),
            columns.map((step) => {
                const cell = cellAt(request, step);
                if (!cell) return el("td", { class: "line-absent", "data-kind": "absent" });
                const [, , kind, tokens, hit] = cell;
                const words = `${data.words[kind]}${tokens ? `, ${plural(tokens, "token")}` : ""}${hit ? `, ${hit} from the cache` : ""}`;
                return el("td", { class: `line-${kind}`, "data-kind": kind, title: `${request.id}, step ${step}: ${words}`, onclick: () => choose(request.id) },
                    tokens ? `${tokens}` : kind === "preempted" ? "×" : "");
            })));
        table.replaceChildren(el("thead", {}, head), el("tbody", {}, rows));
        more.textContent = there.length > SHOWN_ROWS ? `${there.length - SHOWN_ROWS} more requests are there in these steps: choose one below.` : "";
    }

    // ------------------------------------------------------------ why

    function choose(id, moves = false) {
        chosen = id;
        const request = told.requests.find((each) => each.id === id);
        who.value = id;
        parts.textContent = "";
        other.value = "";
        if (moves && request?.cells.length) move(request.cells[0][0] - 2);
        else drawTable();
        reasons.replaceChildren(...(request?.why ?? []).map(([step, text]) => el("li", {},
            el("button", { type: "button", title: "Show these steps", onclick: () => move(step - 4) }, told.times.length > step ? `${told.times[step].toFixed(3)} s` : `${step}`),
            " ", text)));
        if (!reasons.children.length) reasons.replaceChildren(el("li", {}, "never reached the scheduler in this file"));
    }

    async function compare() {
        if (!other.value || !python) return;
        try {
            if (told === data.sample) await python.call("sample", {});
            parts.textContent = (await python.call("prefix", { request: chosen, other: other.value })).join("; ");
        } catch (error) {
            parts.textContent = error.message;
        }
    }

    function show(document) {
        told = document;
        from = 0;
        title.textContent = told === data.sample ? `A sample: ${plural(told.requests.length, "request")} to a real server` : told.name;
        facts.textContent = Object.entries(told.facts).map(([name, value]) => `${name}=${value}`).join(", ");
        notice.textContent = told.notice;
        const options = () => told.requests.map(({ id, name, prompt, summary }) => el("option", { value: id }, `${id}${name === id ? "" : ` (${name})`}: ${count(prompt)} in; ${summary}`));
        who.replaceChildren(...options());
        other.replaceChildren(el("option", { value: "" }, "..."), ...options());
        const worst = told.requests.reduce((most, each) => (each.cells.length > (most?.cells.length ?? -1) ? each : most), null);
        chosen = null;
        drawOverview();
        if (worst) choose(worst.id, true);
        else drawTable();
    }

    box.append(title, input, pick, python?.box ?? "", notice, facts, overview,
        el("div", { class: "widget-controls", role: "group", "aria-label": "Controls" }, slider, where), scroll, CourseWidgets.sideways(scroll), more,
        el("p", { class: "widget-legend" }, Object.entries(data.words).map(([kind, text]) => el("span", {}, el("i", { class: `line-${kind}`, "aria-hidden": "true" }), text))),
        el("h4", {}, "Why"), el("div", { class: "widget-form wide-form" }, labelled("Request", who), python ? labelled("Compare its prompt with", other) : ""), parts, reasons);
    show(told);
    return box;
});
