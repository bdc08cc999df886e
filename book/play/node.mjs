// The pages' worker in Node: `node node.mjs PLAY`, where PLAY is the `play` folder of a site.
//
// Reads messages to the worker as JSON lines and writes its answers so, less the progress.
// course/site/play_check.py drives it. Runs worker.js unchanged: what a browser gives a worker and
// Node does not is put in here, over the file system.

import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const folder = resolve(process.argv[2]) + "/";
const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");

globalThis.window = undefined;
globalThis.self = globalThis;
globalThis.postMessage = (message) => message.progress || say(message);
globalThis.fetch = async (name) => new Response(readFileSync(String(name)));
globalThis.XMLHttpRequest = class {
    open(_, name) {
        this.name = name;
    }
    send() {
        const data = readFileSync(this.name);
        this.status = 200;
        this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
    }
};

const page = { location: { href: pathToFileURL(folder) } };
const script = readFileSync(join(folder, "index.js"), "utf-8").split("\n")[1];
const config = new Function("window", `${script}\nreturn window.COURSE_PLAY;`)(page);
config.base = folder;
await import(pathToFileURL(join(folder, config.worker)));

let last = globalThis.onmessage({ data: { id: 0, kind: "boot", payload: config } });
for await (const line of createInterface({ input: process.stdin })) {
    const message = JSON.parse(line);
    last = last.then(() => globalThis.onmessage({ data: message }));
}
await last;
process.exit(0);
