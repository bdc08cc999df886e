/* The search without its face: words as course/site/search.py cuts them, parts of the index loaded when a query
   needs them, sections in order. `CourseSearch.find(query)` gives the best first. */
"use strict";

globalThis.CourseSearch = (() => {
    const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
    const DIGIT = new Map([...ALPHABET].map((sign, value) => [sign, value]));
    const WORD = /[\p{L}\p{N}]+(?:[_.-][\p{L}\p{N}]+)*/gu;
    const ENDINGS = [["ization", 2, "iz"], ["ation", 3, "at"], ["ion", 4, ""], ["ing", 3, ""], ["ed", 3, ""], ["er", 4, ""], ["or", 4, ""]];
    const SHOWN = 20; // results
    const PER_PAGE = 3;
    const MUCH = 0.1; // what each doubling of a page's sections that answer adds to them
    const LONGEST = 12; // words of a query that are looked at
    /** Left out of a query that has other words. */
    const STOP = new Set(("a about an and any are as at be been but by can could did do does for from get had has have how i if in into is it its " +
        "me my not of on or our should so that the their them then there these they this to vllm was we were what when where which who why will with would you your decide decides difference between happens many much need needs often some work works").split(" "));
    /** What readers call a thing, and what the pages call it; the longest first. */
    const SYNONYMS = [
        ["guided decoding", "structured outputs"], ["constrained decoding", "structured outputs"], ["guided generation", "structured outputs"],
        ["json mode", "structured outputs json"], ["function calling", "tool calls"], ["out of memory", "gpu_memory_utilization memory"],
        ["oom", "gpu_memory_utilization memory"], ["multi modal", "multimodal"], ["vision", "pictures multimodal"], ["image", "picture"], ["images", "pictures"],
        ["time to first token", "ttft"], ["inter-token latency", "itl"], ["record", "flight recorder record"], ["releases are supported", "since the pin release"], ["upgrade", "since the pin upgrade"], ["swa", "sliding window"], ["ep", "expert parallel"], ["tp", "tensor parallel"],
        ["pp", "pipeline parallel"], ["dp", "data parallel"], ["pd", "disaggregated prefill decode"], ["kv transfer", "disaggregated connector"], ["vllm v1", "engine core"],
        ["gguf", "quantization"], ["paged attention", "pagedattention"], ["page table", "block table"], ["continuous batching", "scheduler batching"],
        ["apc", "prefix caching"], ["automatic prefix caching", "prefix caching"], ["mixture of experts", "moe"], ["ssm", "mamba"], ["evict", "eviction evict"],
    ].sort(([a], [b]) => b.length - a.length);

    // ------------------------------------------------------------ words

    const stem = (word) => {
        if (word.length < 4 || !/^[a-zA-Z]+$/.test(word)) return word;
        if (word.endsWith("ies")) word = `${word.slice(0, -3)}y`;
        else if (word.endsWith("sses")) word = word.slice(0, -2);
        else if (word.endsWith("s") && !"sui".includes(word.at(-2))) word = word.slice(0, -1);
        for (const [ending, least, kept] of ENDINGS) {
            if (word.endsWith(ending) && word.length - ending.length >= least) {
                word = word.slice(0, -ending.length) + kept;
                break;
            }
        }
        const last = word.at(-1);
        if (word.length > 3 && last === word.at(-2) && !"aeiouls".includes(last)) word = word.slice(0, -1);
        return word.length > 3 && word.endsWith("e") ? word.slice(0, -1) : word;
    };

    const partsOf = (whole) =>
        whole.split(/[_.-]/).flatMap((piece) => piece.split(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])/));

    /** [[word, weight], ...], as `words` of search.py yields them. */
    const words = (text) => {
        const found = [];
        for (const [whole] of text.matchAll(WORD)) {
            const parts = partsOf(whole);
            if (parts.length === 1) {
                found.push([stem(whole.toLowerCase()), 1]);
                continue;
            }
            const joined = whole.replace(/[_.-]/g, "").toLowerCase();
            if (joined.length <= 40) found.push([joined, 1]);
            for (const part of parts) found.push([stem(part.toLowerCase()), 0.5]);
        }
        return found;
    };

    // ------------------------------------------------------------ parts of the index

    const asked = new Map(); // "kind-name" to a promise of the part
    const taken = new Map();
    const engine = { load: null }; // load(name): runs the script of that name

    /** What each part of the index calls with its data. */
    const take = (kind, place, data) => taken.set(`${kind}${place}`, data);

    const part = (kind, place, name) => {
        const key = `${kind}${place}`;
        if (!asked.has(key)) {
            const loading = engine.load(`${kind}-${name}.js`).then(() => taken.get(key));
            asked.set(key, loading);
            loading.catch(() => asked.delete(key)); // the next query tries again
        }
        return asked.get(key);
    };

    let index = null;
    const open = async (name) => {
        if (index) return index;
        const { pages, shards, vocabulary } = await part("index", 0, name);
        const first = [];
        const pageOf = [];
        pages.forEach(([, , , titles], n) => {
            first.push(pageOf.length);
            for (let i = 0; i < titles.length; i += 1) pageOf.push(n);
        });
        const crumbs = pages.map(([path, crumb, , titles]) =>
            new Set(words(`${crumb} ${titles[0]} ${path.split("/")[0].replaceAll("-", " ")}`).map(([word]) => word)));
        index = { pages, shards, vocabulary, first, pageOf, crumbs };
        return index;
    };

    const shardParts = new Map(); // place to Map(word, postings as text)
    const shard = async (place) => {
        if (!shardParts.has(place)) {
            const text = await part("shard", place, index.shards[place][1]);
            shardParts.set(place, new Map(text.split("\n").map((line) => line.split(" "))));
        }
        return shardParts.get(place);
    };

    /** Words of the index that begin with `prefix`, with their postings; itself first. */
    const expanded = async (prefix) => {
        const { shards } = index;
        let place = shards.findLastIndex(([from]) => from <= prefix);
        if (place < 0) place = 0;
        const found = [];
        for (; place < shards.length && found.length < 60; place += 1) {
            const [from] = shards[place];
            if (from > prefix && !from.startsWith(prefix)) break;
            for (const [word, postings] of await shard(place)) {
                if (word.startsWith(prefix)) found.push([word, postings]);
            }
        }
        return found;
    };

    const decoded = (text) => {
        const found = [];
        let section = -1;
        for (let i = 0; i < text.length; i += 1) {
            let step = 0;
            let scale = 1;
            let digit = DIGIT.get(text[i]);
            while (digit >= 32) {
                step += (digit - 32) * scale;
                scale *= 32;
                digit = DIGIT.get(text[(i += 1)]);
            }
            section += step + digit * scale;
            found.push([section, DIGIT.get(text[(i += 1)])]);
        }
        return found;
    };

    // ------------------------------------------------------------ mistyped words

    /** Insertions, deletions, changes and swaps of neighbours from `a` to `b`; more than `most` is `most + 1`. */
    const distance = (a, b, most) => {
        if (Math.abs(a.length - b.length) > most) return most + 1;
        let before = [];
        let last = Array.from({ length: b.length + 1 }, (_, i) => i);
        for (let i = 1; i <= a.length; i += 1) {
            const row = [i];
            for (let j = 1; j <= b.length; j += 1) {
                row[j] = Math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1));
                if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) row[j] = Math.min(row[j], before[j - 2] + 1);
            }
            if (Math.min(...row) > most) return most + 1;
            [before, last] = [last, row];
        }
        return last[b.length];
    };

    /** The pages' words that a word which none of them has may be: the nearest, the commonest first. */
    const meant = async (typed) => {
        const stems = [...new Set([typed, stem(typed)])];
        const most = typed.length < 4 ? 0 : typed.length < 8 ? 1 : 2;
        if (!most) return [];
        const known = (await part("vocabulary", 0, index.vocabulary)).split(" ");
        const found = [];
        known.forEach((word, place) => {
            let away = Math.min(...stems.map((each) => distance(each, word, most)));
            // The pages' words are stems: the mistyped one may go on behind its beginning.
            if (away > most && word.length > 5 && typed.length > word.length) {
                away = 0.5 + Math.min(...[0, 1].map((more) => distance(typed.slice(0, word.length + more), word, 1)));
                if (away > 1.5 || typed.length > word.length + 6) away = most + 1;
            }
            const first = word[0] === typed[0] ? 0 : 0.5;
            if (away <= most) found.push([away + first, place, word]);
        });
        found.sort(([a, m], [b, n]) => a - b || m - n);
        return found.filter(([away]) => away <= found[0][0] + 0.5).slice(0, 3).map(([away, , word]) => [word, word, 1 - 0.2 * away]);
    };

    // ------------------------------------------------------------ ranking

    /** How likely a page of this kind is the place where a thing is explained. */
    const PRIORS = [
        [/^GLOSSARY\.html$/, 1.2],
        [/^(SETUP|CAREER)\.html$/, 1.1],
        [/\/00-guide\.html$/, 1.3],
        [/\/01-deep-dive\.html$/, 1],
        [/\/labs\/lab-[^/]+\/index\.html$/, 1],
        [/^phase-[^/]+\/index\.html$/, 0.8],
        [/\/(EXERCISES|INTERVIEW|CHEATSHEET|02-mini-build)\.html$/, 0.8],
        [/^CHANGES\.html$/, 0.5],
        [/^phase-/, 0.7],
        [/^index\.html$/, 0.8],
        [/./, 0.65],
    ];
    const prior = (path) => PRIORS.find(([kind]) => kind.test(path))[1];

    /** A query in the pages' own words, without those that say nothing. */
    const inOurWords = (query) => {
        let text = ` ${query.replace(/[?!,;:"'()]/g, " ").replace(/\s+/g, " ").trim()} `;
        for (const [theirs, ours] of SYNONYMS) {
            text = text.replace(new RegExp(` ${theirs}(?= )`, "gi"), ` ${ours}`);
        }
        const all = text.trim().split(" ");
        const left = all.filter((word) => !STOP.has(word.toLowerCase()));
        return (left.length ? left : all).join(" ");
    };

    /** The words of a query: each is a list of [word, weight] that may stand for it. */
    const queryWords = (query) =>
        [...query.matchAll(WORD)].slice(0, LONGEST).map(([whole]) => {
            const joined = whole.replace(/[_.-]/g, "").toLowerCase();
            const parts = partsOf(whole).map((each) => each.toLowerCase());
            if (parts.length === 1) return [[stem(joined), joined, 1]];
            return [[joined, joined, 1], ...parts.map((each) => [stem(each), each, 0.3 / parts.length])];
        });

    /** Section to score for one word of the query, and how rare the word is. */
    const scored = async (options, total) => {
        const scores = new Map();
        let rarity = 0;
        for (const [word, typed, weight] of options) {
            const found = await expanded(word.length > 2 && typed.startsWith(word) ? word : typed);
            for (const [each, text] of found) {
                const exact = each === word || each === typed;
                const near = exact ? 1 : each.startsWith(typed) ? 0.6 * (typed.length / each.length) ** 0.5 : 0;
                if (!near) continue;
                const postings = decoded(text);
                const rare = Math.log(1 + total / postings.length);
                if (exact || rarity === 0) rarity = Math.max(rarity, rare * weight);
                for (const [section, impact] of postings) {
                    const score = weight * near * rare * (impact / 63);
                    if (score > (scores.get(section) ?? 0)) scores.set(section, score);
                }
            }
        }
        return { scores, rarity };
    };

    /** The sections that answer a query, best first: [{page, path, crumb, title, anchor, score}]. */
    const find = async (query, name) => {
        const { pages, pageOf, first, crumbs } = await open(name);
        const asks = queryWords(inOurWords(query));
        if (!asks.length) return [];
        const columns = await Promise.all(asks.map(async (options, place) => {
            const column = await scored(options, pageOf.length);
            if (column.scores.size) return column;
            const others = await meant(options[0][1]);
            if (others.length) asks[place] = others;
            return others.length ? scored(others, pageOf.length) : column;
        }));
        const all = columns.reduce((sum, { rarity }) => sum + rarity, 0) || 1;
        const totals = new Map();
        for (const { scores, rarity } of columns) {
            for (const [section, score] of scores) {
                const entry = totals.get(section) ?? [0, 0];
                totals.set(section, [entry[0] + score, entry[1] + rarity]);
            }
        }
        const stems = new Set(asks.map(([[word]]) => word));
        const ranked = [...totals].map(([section, [score, met]]) => {
            const page = pageOf[section];
            const named = [...stems].filter((word) => crumbs[page].has(word)).length / stems.size;
            const whole = (met / all) ** (asks.length > 2 ? 1.5 : 2);
            return { section, page, score: score * whole * prior(pages[page][0]) * (1 + 0.3 * named) };
        });
        ranked.sort((a, b) => b.score - a.score);
        // A page that says much of it is more likely meant than one that says it once.
        const best = ranked[0]?.score ?? 0;
        const told = new Map();
        for (const { page, score } of ranked) if (score > best / 4) told.set(page, (told.get(page) ?? 0) + 1);
        for (const each of ranked) each.score *= 1 + MUCH * Math.log2(told.get(each.page) ?? 1);
        ranked.sort((a, b) => b.score - a.score);
        const results = ranked.slice(0, 120).map(({ section, page, score }) => {
            const [path, crumb, , titles, anchors] = pages[page];
            const place = section - first[page];
            const own = words(titles[place]).map(([word]) => word);
            const met = own.filter((word) => stems.has(word)).length;
            const share = own.length ? met / own.length : 0;
            const whole = [...stems].filter((word) => own.includes(word)).length / stems.size;
            const top = place === 0 ? 0.15 * whole : 0;
            return { page, place, path, crumb, title: titles[place], anchor: anchors[place],
                score: score * (1 + share * whole + top) };
        });
        results.sort((a, b) => b.score - a.score);
        const perPage = new Map();
        return results.filter(({ page }) => {
            perPage.set(page, (perPage.get(page) ?? 0) + 1);
            return perPage.get(page) <= PER_PAGE;
        }).slice(0, SHOWN);
    };

    /** The text of a result's section. */
    const textOf = async ({ page, place }) => (await part("text", page, index.pages[page][2]))[place];

    return Object.assign(engine, { take, find, open, textOf, words, stem });
})();
