/* The reader is the allocator: a small pool, its free queue and its index. The document is that of
 * course/site/widgets/block_allocator.py; the moves are this file's, held against the engine's by a browser test. */
"use strict";

(() => {
    /** A pool as mini_vllm/block_pool.py and kv_cache.py keep it; a hash is here the text up to the block's end. */
    class Pool {
        constructor({ num_blocks, block_size, order }) {
            this.size = block_size;
            this.order = order;
            this.refs = new Array(num_blocks).fill(0);
            this.keys = new Array(num_blocks).fill(null);
            this.memory = new Array(num_blocks).fill("");
            this.free = this.refs.map((_, id) => id).slice(1); // block 0 is the null block
            this.index = new Map(); // key -> ids, the earliest first
            this.live = new Map(); // name -> { text, table, cached }
            this.last = {};
        }

        move([kind, name, text]) {
            const before = [...this.keys];
            let hits = [], taken = [];
            if (kind === "add") [hits, taken] = this.add(name, text);
            else if (kind === "grow") taken = this.grow(this.live.get(name), text);
            else this.end(name);
            const fresh = taken || [];
            this.last = { refused: taken === null, hits, found: hits.length * this.size, new: fresh,
                evicted: fresh.map((id) => before[id]).filter((key) => key !== null) };
        }

        add(name, text) {
            const hits = [];
            for (let end = this.size; end <= text.length - 1; end += this.size) { // never the last token
                const holders = this.index.get(text.slice(0, end));
                if (!holders) break;
                hits.push(holders[0]);
            }
            const missing = Math.ceil(text.length / this.size) - hits.length;
            const revived = hits.filter((id) => this.refs[id] === 0);
            if (missing + revived.length > this.free.length) return [hits, null];
            for (const id of hits) {
                if (this.refs[id] === 0) this.free.splice(this.free.indexOf(id), 1);
                this.refs[id] += 1;
            }
            const taken = this.take(missing);
            const request = { text, table: [...hits, ...taken], cached: hits.length };
            this.live.set(name, request);
            this.write(request);
            return [hits, taken];
        }

        grow(request, character) {
            const more = request.text.length + 1 > request.table.length * this.size ? 1 : 0;
            if (more > this.free.length) return null;
            const taken = this.take(more);
            request.table.push(...taken);
            request.text += character;
            this.write(request);
            return taken;
        }

        end(name) {
            const { table } = this.live.get(name);
            this.live.delete(name);
            const order = this.order === "tail" ? [...table].reverse() : table;
            for (const id of order) this.refs[id] -= 1;
            this.free.push(...order.filter((id) => this.refs[id] === 0));
        }

        /** From the front of the queue; what they held is forgotten now and not before. */
        take(count) {
            const taken = this.free.splice(0, count);
            for (const id of taken) {
                const key = this.keys[id];
                if (key !== null) {
                    const left = this.index.get(key).filter((each) => each !== id);
                    if (left.length) this.index.set(key, left);
                    else this.index.delete(key);
                    this.keys[id] = null;
                }
                this.refs[id] = 1;
                this.memory[id] = "";
            }
            return taken;
        }

        /** Tokens into blocks; a block that is full enters the index. */
        write(request) {
            const { text, table } = request;
            table.forEach((id, at) => { this.memory[id] = text.slice(at * this.size, (at + 1) * this.size); });
            for (; (request.cached + 1) * this.size <= text.length; request.cached += 1) {
                const id = table[request.cached];
                if (this.keys[id] !== null) continue;
                const key = text.slice(0, (request.cached + 1) * this.size);
                this.keys[id] = key;
                this.index.set(key, [...(this.index.get(key) || []), id]);
            }
        }
    }

    const played = (ops, settings) => {
        const pool = new Pool(settings);
        for (const op of ops) pool.move(op);
        return pool;
    };
    CourseWidgets.formulas.playedPool = played;

    /** The state after a story, as `replay` gives it. */
    CourseWidgets.formulas.poolAfter = (ops, settings) => {
        const { refs, keys, free, index, live, last } = played(ops, settings);
        return { refs, keys, free, index: Object.fromEntries(index), last,
            tables: Object.fromEntries([...live].map(([name, { table }]) => [name, table])) };
    };
})();

CourseWidgets.mount("block-allocator", (data) => {
    const { el, labelled, plural, questions, formulas } = CourseWidgets;
    const size = data.block_size;
    const still = matchMedia("(prefers-reduced-motion: reduce)");
    let ops = data.story.map((op) => [...op]);
    let order = "tail";
    const box = el("section", { class: "widget-box alloc", "aria-label": "You are the allocator" });
    const visible = (text) => text.replaceAll(" ", "␣");
    const settings = (of) => ({ num_blocks: data.num_blocks, block_size: size, order: of });
    const other = { tail: "head", head: "tail" };

    const prompt = el("input", { type: "text", maxlength: data.most, value: data.prompts[1], spellcheck: "false", "data-input": "prompt" });
    const form = el("form", { class: "alloc-add" }, labelled("Prompt, a token per letter", prompt),
        el("button", { type: "submit" }, "Add"),
        data.prompts.map((text) => el("button", { type: "button", class: "alloc-ready", title: `Add a request that says ${text}`,
            onclick: () => add(text) }, visible(text))));
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        add(prompt.value);
    });
    const orders = el("fieldset", { class: "alloc-order" }, el("legend", {}, "A table is freed"),
        Object.entries(data.orders).map(([name, words]) => el("label", {},
            el("input", { type: "radio", name: "alloc-order", value: name, checked: name === order ? "" : null,
                onchange: () => { order = name; draw(); } }), ` ${words}`)));
    const undo = el("button", { type: "button", onclick: () => { ops.pop(); draw(); } }, "Undo");
    const reset = el("button", { type: "button", onclick: () => { ops = []; draw(); } }, "Empty the pool");
    const requests = el("ul", { class: "alloc-requests" });
    const grid = el("ol", { class: "film-pool alloc-pool", "aria-label": "Blocks" });
    const queue = el("ol", { class: "film-queue", "aria-label": "Free queue, front first" });
    const index = el("ul", { class: "film-index alloc-index" });
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const versus = el("p", { class: "alloc-versus" });

    const nextName = () => {
        const number = ops.filter(([kind]) => kind === "add").length;
        return String.fromCharCode(65 + (number % 26)) + (number < 26 ? "" : Math.floor(number / 26));
    };

    function add(text) {
        const clean = [...text].filter((letter) => letter >= " " && letter <= "~").join("");
        if (!clean) {
            said.textContent = "Type a prompt of letters first.";
            return;
        }
        step(["add", nextName(), clean]);
    }

    function step(op) {
        const tried = formulas.playedPool([...ops, op], settings(order));
        if (tried.last.refused) {
            const needs = op[0] === "add" ? `${plural(Math.ceil(op[2].length / size), "block")}, ${tried.last.hits.length} of them found`
                : "one more block";
            said.textContent = `Refused: ${op[1]} needs ${needs}; ${tried.free.length} ${tried.free.length === 1 ? "is" : "are"} free. Nothing has changed. End a request.`;
            said.dataset.refused = "yes";
            return;
        }
        ops.push(op);
        draw();
    }

    function tell({ last, free }) {
        if (!ops.length) return "Nine blocks, all free. Block 0 is never handed out. Add a request.";
        const [kind, name, text] = ops[ops.length - 1];
        const lost = last.evicted.length ? ` Forgotten: ${plural(last.evicted.length, "cached block")}.` : "";
        if (kind === "end") return `${name} has ended; ${plural(free.length, "block")} ${free.length === 1 ? "is" : "are"} free, and free blocks keep their text until they are taken.`;
        if (kind === "grow") {
            return last.new.length ? `${name} needed a block: ${last.new[0]}, from the queue's front.${lost}`
                : `${name}'s last block had room for one token more.`;
        }
        const found = last.found ? `${last.found} of ${text.length} tokens were found, in ${last.hits.length > 1 ? "blocks" : "block"} ${last.hits.join(", ")}`
            : "nothing was found";
        return `${name}: ${found}; ${last.new.join(", ")} came from the queue's front.${lost}`;
    }

    /** The other order's fate of the same story, where it differs. */
    function compare(pool) {
        const rival = formulas.playedPool(ops, settings(other[order]));
        const [kind] = ops[ops.length - 1] || [""];
        versus.dataset.found = rival.last.found ?? "";
        if (kind === "add" && (rival.last.found !== pool.last.found || rival.last.refused)) {
            return `Freed ${other[order]} first, the same story finds ${rival.last.found} tokens for it.`;
        }
        return "";
    }

    function glide(change) {
        const before = new Map([...queue.children].map((node) => [node.dataset.id, node.getBoundingClientRect()]));
        change();
        if (still.matches) return;
        for (const node of queue.children) {
            const was = before.get(node.dataset.id), now = node.getBoundingClientRect();
            if (was && (was.left !== now.left || was.top !== now.top)) {
                node.animate([{ transform: `translate(${was.left - now.left}px, ${was.top - now.top}px)` }, { transform: "none" }], 350);
            } else if (!was) node.animate([{ opacity: 0, transform: "translateY(-1em)" }, { opacity: 1, transform: "none" }], 350);
        }
    }

    function draw() {
        const pool = formulas.playedPool(ops, settings(order));
        for (const radio of orders.querySelectorAll("input")) radio.checked = radio.value === order;
        const kindOf = (id) => (pool.refs[id] > 1 ? "shared" : pool.refs[id] === 1 ? "used" : pool.keys[id] !== null ? "cached" : "free");
        const words = { shared: "shared", used: "held", cached: "free, cached", free: "free" };
        const changed = new Set([...(pool.last.hits || []), ...(pool.last.new || [])]);
        grid.replaceChildren(...pool.refs.map((refs, id) => (id === 0
            ? el("li", { class: "film-block film-null" }, el("span", { class: "film-id" }, "0"), el("span", { class: "film-facts" }, "null"))
            : el("li", { class: `film-block film-${kindOf(id)}${changed.has(id) ? " film-changed" : ""}`, "data-id": id, "data-ref": refs },
                el("span", { class: "film-id" }, id),
                el("code", { class: "film-tokens" }, visible(pool.memory[id]).padEnd(size, "·")),
                el("span", { class: "film-facts" }, refs > 1 ? `held ×${refs}` : words[kindOf(id)])))));
        glide(() => queue.replaceChildren(...(pool.free.length ? pool.free.map((id) => el("li", { class: `film-${kindOf(id)}`, "data-id": id }, id))
            : [el("li", { class: "film-none" }, "empty")])));
        const entries = [...pool.index];
        index.replaceChildren(...(entries.length ? entries.map(([key, ids]) =>
            el("li", { "data-key": key }, el("code", {}, visible(key)), ` → ${ids.join(", ")}`)) : [el("li", { class: "film-none" }, "empty")]));
        const focused = document.activeElement?.dataset?.act;
        requests.replaceChildren(...(pool.live.size ? [...pool.live].map(([name, { text, table }]) => {
            const act = (id, label, action) => el("button", { type: "button", "data-act": `${id}-${name}`, "aria-label": `${label}: request ${name}`, onclick: action }, label);
            const replied = ops.filter((op) => op[0] === "grow" && op[1] === name).length;
            return el("li", { "data-request": name }, el("strong", {}, name), " ", el("code", {}, visible(text)),
                el("span", { class: "alloc-table" }, `blocks ${table.join(", ")}`),
                act("grow", "+1 token", () => step(["grow", name, data.reply[replied % data.reply.length]])),
                act("end", "End", () => step(["end", name])));
        }) : [el("li", { class: "film-none" }, "No request runs.")]));
        if (focused) (requests.querySelector(`[data-act="${focused}"]`) || prompt).focus();
        said.textContent = tell(pool);
        delete said.dataset.refused;
        said.dataset.found = pool.last.found ?? "";
        versus.textContent = compare(pool);
        undo.disabled = reset.disabled = ops.length === 0;
    }

    const posed = questions(data.questions, "Play it", (question) => {
        ops = question.ops.map((op) => [...op]);
        order = question.order;
        draw();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(el("p", { class: "widget-title" }, "You are the allocator: nine blocks, four tokens each"), ...posed, form, requests, said, versus, grid,
        el("p", { class: "widget-legend" }, [["used", "held"], ["shared", "shared"], ["cached", "free, cached"], ["free", "free"], ["changed", "found or taken just now"]]
            .map(([name, words]) => el("span", {}, el("i", { class: `film-block film-${name}`, "aria-hidden": "true" }), words))),
        el("div", { class: "film-books" },
            el("div", {}, el("h4", {}, "Free queue: the front is taken first"), queue),
            el("div", {}, el("h4", {}, "Index: text up to a block's end"), index)),
        el("div", { class: "alloc-foot" }, orders, undo, reset));
    draw();
    return box;
});
