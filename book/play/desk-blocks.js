/* The Python blocks of a page: Run and Edit on each, one state for all of them, as the course's own check runs them.
 *
 * A block runs in the state that the blocks above it leave. What was not run yet is run first; where this block, or
 * one below it, has run already, all begin anew, so that an output is always that of the page read from its top.
 * Edits stay in this browser, one item of localStorage a page: {mark of the given block: text}.
 */
"use strict";

CourseDesk.blocks = (found, excepted) => {
    const { el, button } = CourseDesk;
    const session = CoursePlay.session();
    const loading = CourseDesk.loading(session);
    const page = location.pathname;
    let age = 0; // how many states this page has begun
    let ran = 0; // blocks that have run in the present one, from the top
    let running = null;
    let began = 0;

    // A worker that ends takes the state with it, whoever ended it; one that loads is not yet at work.
    const others = session.onstate;
    session.onstate = (state) => {
        others?.(state);
        if (state === "idle") ran = 0;
        if (state === "busy") began = performance.now();
    };

    const blocks = found.map(({ code, expected }, index) => {
        const pre = code.closest("pre");
        const block = { index, pre, expected, given: code.textContent, editor: null };
        block.run = button("Run", () => run(block), { "aria-label": `Run block ${index + 1}` });
        block.stop = button("Stop", () => session.stop(), { hidden: true });
        block.edit = button("Edit", () => edit(block));
        block.said = el("span", { class: "desk-said" });
        block.live = el("div", { role: "status", class: "desk-live" }, block.said);
        block.out = el("div", { class: "desk-out" });
        block.box = el("div", { class: "desk-block" },
            el("div", { class: "desk-bar" }, excepted[index] ? `On your machine only: ${excepted[index]}.`
                : [block.run, block.stop, block.edit, block.live]), block.out);
        pre.after(block.box);
        return block;
    });

    const textOf = (block) => block.editor?.get() ?? block.given;

    // ------------------------------------------------------------ editing

    const KEY = `course-blocks:${page}`;

    /** The edits of this page; a browser that keeps nothing has none. */
    function kept() {
        try {
            const found = JSON.parse(localStorage.getItem(KEY));
            return typeof found === "object" && found !== null ? found : {};
        } catch {
            return {};
        }
    }

    /** Keep a block's text, or forget it where it is null. */
    function keep(block, text) {
        const edits = { ...kept(), [CourseDesk.mark(block.given)]: text ?? undefined };
        try {
            if (Object.values(edits).some((each) => each !== undefined)) localStorage.setItem(KEY, JSON.stringify(edits));
            else localStorage.removeItem(KEY);
        } catch {
            // nothing can be kept: the edit lasts as long as the page
        }
    }

    const keptOf = (block) => {
        const text = kept()[CourseDesk.mark(block.given)];
        return typeof text === "string" ? text : null;
    };

    async function edit(block) {
        if (block.editor) return putBack(block);
        const room = el("div", { class: "desk-editor" });
        block.edit.disabled = true;
        block.pre.before(room);
        const doc = (keptOf(block) ?? block.given).replace(/\n$/, "");
        const changed = () => {
            session.ready();
            touched(block);
            keep(block, textOf(block) === block.given ? null : textOf(block));
        };
        const editor = await CourseDesk.editor(room, {
            doc, onChange: changed, label: `Python, block ${block.index + 1} of this page`,
        });
        block.editor = { ...editor, get: () => `${editor.get()}\n`, room };
        CourseDesk.runsByKey(room, () => run(block));
        block.pre.hidden = true;
        block.edit.disabled = false;
        block.edit.textContent = "Put back";
        block.edit.setAttribute("aria-label", `Put block ${block.index + 1} back as it was`);
        editor.focus();
    }

    function putBack(block) {
        block.editor.destroy();
        block.editor.room.remove();
        block.editor = null;
        block.pre.hidden = false;
        keep(block, null);
        named(block);
        touched(block);
        clear(block);
    }

    /** What the button of a block that shows the given text does. */
    function named(block) {
        const mine = keptOf(block) !== null;
        block.edit.textContent = mine ? "Show my edit" : "Edit";
        block.edit.setAttribute("aria-label", mine ? `Show my edit of block ${block.index + 1}` : `Edit block ${block.index + 1}`);
    }
    blocks.forEach(named);

    /** What ran from here on is no longer what the page says. */
    function touched(block) {
        if (block.index < ran) {
            ran = 0;
            age += 1;
        }
    }

    // ------------------------------------------------------------ running

    async function run(block) {
        if (running) return;
        running = block;
        if (ran > block.index) {
            ran = 0;
            age += 1;
        }
        for (const each of blocks) each.run.disabled = true;
        block.stop.hidden = false;
        block.box.prepend(loading.box);
        loading.show();
        clear(block);
        const first = ran;
        const state = `${page}#${age}`;
        try {
            for (const each of blocks.slice(first, block.index + 1)) {
                if (excepted[each.index]) { // what it defines before it fails is used below
                    await session.call("block", { page: state, index: each.index, code: each.given });
                    continue;
                }
                say(block, each === block ? "Running ..." : `Running block ${each.index + 1} of ${block.index + 1} first ...`);
                if (!(await one(each, state, each === block))) {
                    if (each !== block) say(block, `Block ${each.index + 1} above failed; it must run first.`, "bad");
                    ran = 0;
                    age += 1;
                    break;
                }
                ran = each.index + 1;
            }
        } catch (error) { // stopped, or nothing can be run: the worker's state is gone
            ran = 0;
            say(block, error.message === "stopped" ? "Stopped." : error.message, "bad");
        }
        loading.hide();
        block.stop.hidden = true;
        for (const each of blocks) each.run.disabled = false;
        running = null;
    }

    /** Run one block and show what it printed; whether it ran to its end. */
    async function one(block, state, asked) {
        began = performance.now();
        const shown = el("code", { tabindex: "0" });
        const box = el("pre", { class: "desk-printed" }, shown);
        clear(block);
        const payload = { page: state, index: block.index, code: textOf(block) };
        const { text, error } = await session.call("block", payload,
            (event) => {
                loading.hide();
                if (!shown.isConnected) block.out.replaceChildren(box);
                shown.append(event.text);
            });
        const took = `${((performance.now() - began) / 1000).toFixed(1)} s`;
        if (error) {
            say(block, `An error, after ${took}.`, "bad");
            block.out.replaceChildren(text ? box : "", el("pre", { class: "desk-error" },
                el("code", { tabindex: "0" }, error)));
            return false;
        }
        compare(block, text, box, took, asked);
        return true;
    }

    function compare(block, text, box, took, asked) {
        const printed = block.expected?.textContent;
        if (printed === undefined) say(block, text ? `Ran in ${took}.` : `Ran in ${took}; it prints nothing.`, "good");
        else if (text === printed) {
            say(block, `Ran in ${took}: it printed what stands below.`, "good");
            block.out.replaceChildren();
        } else {
            say(block, `Ran in ${took}: it printed something else than the page.`, block.editor ? "" : "bad");
            block.out.replaceChildren(CourseDiff.draw(printed, text, ["the page", "this run"]));
        }
        if (!asked) block.said.append(" Run for a block below.");
    }

    function say(block, text, kind = "") {
        block.said.textContent = text;
        block.said.className = `desk-said ${kind ? `desk-${kind}` : ""}`;
    }

    function clear(block) {
        say(block, "");
        block.out.replaceChildren();
    }
};
