/* What the widgets of phases 03 to 06 share: a question with its choices, and a grip that is dragged or moved by keys.
 * Nothing global but `CourseDecide`.
 */
"use strict";

const CourseDecide = (() => {
    const { el, svg } = CourseWidgets;

    /** Questions with choices, one at a time; `set(posed)` shows what is so, once it is answered. */
    function ask(list, set) {
        let asked = 0;
        const question = el("p", {});
        const buttons = el("p", { class: "decide-choices" });
        const reply = el("p", { class: "knob-reply decide-reply", "aria-live": "polite" });

        function pose(number) {
            asked = number % list.length;
            const posed = list[asked];
            question.replaceChildren(el("b", {}, `Predict (${asked + 1} of ${list.length}). `), posed.ask);
            buttons.replaceChildren(...posed.choices.map((choice) =>
                el("button", { type: "button", "data-choice": choice, onclick: () => answer(choice) }, `${choice}`)),
            el("button", { type: "button", class: "decide-next", onclick: () => {
                pose(asked + 1);
                buttons.firstChild.focus(); // its own button is gone
            } }, "Next question"));
            reply.textContent = "";
        }
        function answer(choice) {
            const posed = list[asked];
            set(posed);
            const right = choice === posed.answer;
            reply.textContent = `${right ? `${posed.answer}: right.` : `Not ${choice}: ${posed.answer}.`} ${posed.because || ""}`;
            for (const button of buttons.querySelectorAll("[data-choice]")) {
                const own = button.dataset.choice;
                button.classList.toggle("decide-right", own === `${posed.answer}`);
                button.classList.toggle("decide-wrong", !right && own === `${choice}`);
            }
        }
        pose(0);
        return el("div", { class: "decide-ask" }, question, buttons, reply);
    }

    /** A grip in an SVG: drag it, or focus it and press the arrow keys.
     *
     * `spec` has name, least, most, step, value; `place(value)` gives [x, y], `read(x, y)` a value, `moved(value)` is told of
     * a move, `settled()` of its end; `sideways` is for one that is dragged sideways alone. Returns the element and `set(value)`, which tells nobody.
     */
    function grip(spec) {
        const node = svg("g", {
            class: spec.sideways ? "decide-grip decide-sideways" : "decide-grip", role: "slider", tabindex: 0, "aria-label": spec.name,
            "aria-valuemin": spec.least, "aria-valuemax": spec.most, "data-grip": spec.key,
        }, svg("circle", { r: spec.reach || 14, class: "decide-reach" }), svg("circle", { r: 4.5, class: "decide-dot" }));
        let value = spec.value;
        let held = false;

        function set(to) {
            const steps = Math.round(to / spec.step);
            value = Math.max(spec.least, Math.min(spec.most, Number((steps * spec.step).toFixed(6))));
            const [x, y] = spec.place(value);
            node.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
            node.setAttribute("aria-valuenow", value);
        }
        function move(to) {
            const before = value;
            set(to);
            if (value !== before) spec.moved(value);
        }
        node.addEventListener("pointerdown", (event) => {
            event.preventDefault();
            node.setPointerCapture(event.pointerId);
            node.focus();
            held = true;
        });
        node.addEventListener("pointermove", (event) => {
            if (!held) return;
            const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(node.ownerSVGElement.getScreenCTM().inverse());
            move(spec.read(at.x, at.y));
        });
        for (const name of ["pointerup", "pointercancel"]) {
            node.addEventListener(name, () => {
                held = false;
                spec.settled?.();
            });
        }
        node.addEventListener("keydown", (event) => {
            const moves = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 };
            if (!(event.key in moves)) return;
            event.preventDefault();
            event.stopPropagation();
            move(value + moves[event.key] * spec.step);
            spec.settled?.();
        });
        set(value);
        return { node, set };
    }

    /** Arrow keys inside a widget do not turn the page. */
    const keepKeys = (box) => box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });

    /** Facts as a row of terms and values. */
    const facts = (list) => list.map(([words, id, value, text]) => el("div", {}, el("dt", {}, words),
        el("dd", { "data-result": id, "data-value": value }, text)));

    return { ask, grip, keepKeys, facts };
})();
