/* A text in the fragment of an address: packed and unpacked in this page. Nothing global but `CourseShare`. */
"use strict";

const CourseShare = (() => {
    const NAME = "text";
    const LONGEST = 400_000; // characters of a text, as CourseStore keeps them
    const LINK = 32_000; // characters of a packed text: what browsers and chats take as an address

    const through = async (bytes, stream) => {
        const out = [];
        let size = 0;
        const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
        for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
            size += value.length;
            if (size > 4 * LONGEST) { // unpacked, a few characters could be a gigabyte
                await reader.cancel();
                throw new Error(`it has more than ${LONGEST} characters`);
            }
            out.push(value);
        }
        return new Uint8Array(await new Blob(out).arrayBuffer());
    };

    /** A text in letters that an address may hold. */
    async function packed(text) {
        const bytes = await through(new TextEncoder().encode(text), new CompressionStream("deflate-raw"));
        const letters = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))
            .replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
        if (letters.length > LINK) throw new Error(`packed it has ${letters.length} characters, an address takes ${LINK}; use Export`);
        return letters;
    }

    /** The text again. Throws an Error where the letters are of no text. */
    async function unpacked(letters) {
        let bytes;
        try {
            bytes = Uint8Array.from(atob(letters.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0));
        } catch {
            throw new Error("it is cut off or was changed");
        }
        try {
            const text = new TextDecoder("utf-8", { fatal: true }).decode(await through(bytes, new DecompressionStream("deflate-raw")));
            if (text.length > LONGEST) throw new Error(`it has more than ${LONGEST} characters`);
            return text;
        } catch (error) {
            throw error instanceof TypeError ? new Error("it is cut off or was changed") : error;
        }
    }

    /** What the fragment of an address holds, or null. */
    const given = (hash) => (hash.startsWith(`#${NAME}=`) ? hash.slice(NAME.length + 2) : null);

    return { NAME, packed, unpacked, given };
})();
