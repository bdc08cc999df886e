/* The site's service worker: what was read stays readable without a network.
 *
 * The network is asked first, always: a page or file comes from the cache only where the network gives none, so a new
 * build is never hidden by an old one. Each build has a cache of its own, and drops that of the build before, so pages
 * of two builds never meet. What must not be stored (`no-store`, as `course book serve` sends it) is not.
 * `BUILD` is set by course/site/book_finish.py.
 */
"use strict";

const BUILD = "";
const CACHE = `course-${BUILD}`;
const AWAY = "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><title>Offline</title>"
    + "<p>There is no network, and this page was not opened before.</p>";

self.addEventListener("install", () => self.skipWaiting());

self.addEventListener("activate", (event) => event.waitUntil((async () => {
    for (const name of await caches.keys()) {
        if (name.startsWith("course-") && name !== CACHE) await caches.delete(name);
    }
    await self.clients.claim();
})()));

async function keep(request, answer) {
    if (!answer.ok || answer.type !== "basic" || /no-store/.test(answer.headers.get("Cache-Control") ?? "")) return;
    const kept = answer.clone();
    await (await caches.open(CACHE)).put(request, kept);
}

self.addEventListener("fetch", (event) => {
    const { request } = event;
    if (request.method !== "GET" || !request.url.startsWith(self.registration.scope)) return;
    if (new URL(request.url).pathname.includes("/.course/")) return; // the reader's own files
    event.respondWith((async () => {
        try {
            const answer = await fetch(request);
            event.waitUntil(keep(request, answer).catch(() => {})); // a full disk keeps nothing
            return answer;
        } catch (error) {
            const cache = await caches.open(CACHE);
            const kept = await cache.match(request, { ignoreVary: true });
            if (kept) return kept;
            if (request.mode !== "navigate") throw error;
            return new Response(AWAY, { status: 503, headers: { "Content-Type": "text/html" } });
        }
    })());
});

/* The page that started this worker had loaded its parts before: it names them. */
self.addEventListener("message", (event) => event.waitUntil((async () => {
    for (const url of event.data?.loaded ?? []) {
        if (!url.startsWith(self.registration.scope)) continue;
        const answer = await fetch(url).catch(() => null);
        if (answer) await keep(url, answer).catch(() => {});
    }
})()));
