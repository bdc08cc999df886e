/* Draw a shape; byte-sees, run by mini_vllm in the page, says what it sees. The document is that of
 * course/site/widgets/draw_shape.py, the answers those of course/site/seeing.py. Loads after a click. */
"use strict";

CourseWidgets.mount("draw-shape", (data) => {
    const { el, plural, labelled, choice } = CourseWidgets;
    const SIDE = data.side, SCALE = 4;
    const python = CourseWidgets.inPage("course.site.seeing", data.bytes);
    const box = el("section", { class: "widget-box", "aria-label": "Draw a shape and ask what it is" });
    if (!python) {
        box.append(el("p", { class: "widget-title" }, "This copy of the site cannot run the model"),
            el("p", {}, "It was built without what runs Python in a page. In a checkout of the course:"),
            el("pre", {}, el("code", {}, "uv run course book runtime\nuv run --extra book course book serve")));
        return box;
    }

    const named = (id, field) => { field.dataset.input = id; return field; };
    const canvas = el("canvas", { width: SIDE * SCALE, height: SIDE * SCALE, role: "img", "aria-label": "Where you draw", style: "touch-action: none; border: 1px solid; max-width: 100%; cursor: crosshair" });
    const ink = canvas.getContext("2d", { willReadFrequently: true });
    const colour = named("colour", choice([...Object.keys(data.colours), "rubber"], "red", () => {}));
    const question = named("question", choice(data.questions, data.questions[0], () => {}));
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const trouble = el("p", { class: "live-trouble", role: "alert" });
    const steps = el("tbody");
    const table = el("table", { hidden: "" }, el("thead", {}, el("tr", {}, ["step", "tokens", `of ${data.budget}`, "embeddings encoded, of 64"].map((word) => el("th", {}, word)))), steps);
    let examples = 0;

    function clear() {
        ink.fillStyle = "white";
        ink.fillRect(0, 0, canvas.width, canvas.height);
    }

    let last = null;
    const at = (event) => {
        const shown = canvas.getBoundingClientRect();
        return [(event.clientX - shown.left) * canvas.width / shown.width, (event.clientY - shown.top) * canvas.height / shown.height];
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); last = at(event); draw(event); });
    canvas.addEventListener("pointermove", (event) => { if (last) draw(event); });
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { last = null; });
    function draw(event) {
        const now = at(event), rgb = data.colours[colour.value];
        ink.strokeStyle = rgb ? `rgb(${rgb.join(",")})` : "white";
        ink.lineWidth = rgb ? 14 : 30;
        ink.lineCap = ink.lineJoin = "round";
        ink.beginPath();
        ink.moveTo(...last);
        ink.lineTo(now[0] + 0.01, now[1]);
        ink.stroke();
        last = now;
    }

    // The drawing at the model's size, as base64 of red, green and blue.
    function pixels() {
        const small = el("canvas", { width: SIDE, height: SIDE }).getContext("2d");
        small.imageSmoothingQuality = "high";
        small.drawImage(canvas, 0, 0, SIDE, SIDE);
        const { data: raw } = small.getImageData(0, 0, SIDE, SIDE);
        return btoa(Array.from(raw).filter((_, i) => i % 4 < 3).map((byte) => String.fromCharCode(byte)).join(""));
    }

    function lay(text) {
        const raw = atob(text), image = new ImageData(SIDE, SIDE);
        for (let i = 0; i < SIDE * SIDE; i++) image.data.set([...[0, 1, 2].map((k) => raw.charCodeAt(3 * i + k)), 255], 4 * i);
        const small = el("canvas", { width: SIDE, height: SIDE });
        small.getContext("2d").putImageData(image, 0, 0);
        ink.imageSmoothingEnabled = false;
        ink.drawImage(small, 0, 0, canvas.width, canvas.height);
    }

    const buttons = [];
    async function inTurn(what) {
        buttons.forEach((button) => { button.disabled = true; });
        trouble.textContent = "";
        try {
            await what();
        } catch (error) {
            trouble.textContent = error.message;
        } finally {
            buttons.forEach((button) => { button.disabled = false; });
            ask.textContent = python.offer("What does it see?");
            one.textContent = python.offer("Draw one for me");
        }
    }

    async function look() {
        const told = await python.call("see", { pixels: pixels(), question: question.value });
        verdict.textContent = `It says: ${told.answer}. ${plural(told.tokens, "token")} in the prompt, ${told.found} found in the prefix cache; `
            + `of the encoder's cache ${told.free} of ${told.size} rows are free, ${told.freeable} freeable.`;
        verdict.dataset.answer = told.answer;
        verdict.dataset.tokens = told.tokens;
        steps.replaceChildren(...told.steps.map(([tokens, rows], i) => el("tr", {}, [i + 1, tokens, `${Math.round(100 * tokens / data.budget)} %`, rows || "0, from the cache"].map((each) => el("td", {}, each)))));
        table.hidden = false;
    }

    const ask = el("button", { type: "button", class: "live-step", onclick: () => inTurn(look) }, python.offer("What does it see?"));
    const one = el("button", { type: "button", onclick: () => inTurn(async () => lay(await python.call("example", { seed: examples++ }))) }, python.offer("Draw one for me"));
    const anew = el("button", { type: "button", onclick: clear }, "Clear");
    buttons.push(ask, one, anew);
    clear();
    box.append(
        el("div", { class: "widget-form" }, labelled("Colour", colour), labelled("Question", question)),
        canvas, el("p", {}, ask, " ", one, " ", anew), python.box, trouble, verdict, table,
        el("p", { class: "widget-legend" }, "Nothing is sent anywhere: the model, of 2.4 million parameters, runs in this page. Ask twice about one drawing: the second time its tokens are found."));
    return box;
});
