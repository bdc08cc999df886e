// The page's side of code in the page: one worker, started at the first call.
//
// Defines window.CoursePlay. Loads nothing until it is asked to run something.
"use strict";

(() => {
    const play = window.COURSE_PLAY;
    // A worker whose memory has grown past this begins anew: WebAssembly never gives memory back.
    const LARGEST = 700 * 2 ** 20;

    class Session {
        #worker = null;
        #queue = [];
        #running = null;
        #timer = 0;
        #last = 0;
        #kept = false; // does the worker hold what later calls build upon?
        state = "idle";
        onprogress = null;
        onstate = null;

        // Run something; one call at a time, the others wait.
        call(kind, payload, onEvent) {
            return new Promise((resolve, reject) => {
                this.#queue.push({ kind, payload, onEvent, resolve, reject });
                this.#next();
            });
        }

        // Begin to load behind a reader who has opened a lab or writes, so that the first run need not wait for it.
        ready() {
            if (this.state === "idle" && !navigator.connection?.saveData) {
                this.call("ready", {})
                    .then(() => this.#queue.length || this.#running || this.call("ready", { engine: true }))
                    .catch(() => {}); // the first run tells what is wrong
            }
        }

        // End the worker at once, with whatever it runs and whatever waits.
        stop(why = "stopped") {
            this.#end();
            const calls = [this.#running, ...this.#queue].filter(Boolean);
            this.#running = null;
            this.#queue = [];
            this.#set("idle");
            for (const call of calls) {
                call.reject(new Error(why));
            }
        }

        #set(state) {
            if (state !== this.state) {
                this.state = state;
                this.onstate?.(state);
            }
        }

        #end() {
            clearTimeout(this.#timer);
            this.#worker?.terminate();
            this.#worker = null;
            this.#kept = false;
        }

        #next() {
            if (this.#running || !this.#queue.length) {
                return;
            }
            if (!play) {
                this.stop("this site was built without what runs Python");
                return;
            }
            const call = (this.#running = this.#queue.shift());
            call.id = ++this.#last;
            if (this.#worker) {
                this.#begin(call);
            } else {
                this.#start();
            }
        }

        #start() {
            const worker = new Worker(play.base + play.worker, { type: "module" });
            this.#worker = worker;
            this.#set("loading");
            worker.onmessage = ({ data }) => worker === this.#worker && this.#heard(data);
            worker.onerror = (event) => {
                event.preventDefault?.();
                if (worker === this.#worker) {
                    this.stop(event.message || "Python could not be started");
                }
            };
            worker.postMessage({ id: 0, kind: "boot", payload: play });
        }

        #begin(call) {
            this.#set("busy");
            this.#kept ||= call.kind !== "grade" && call.kind !== "ready";
            if (call.kind !== "grade") {
                this.#watch(call);
            }
            this.#worker.postMessage({ id: call.id, kind: call.kind, payload: call.payload });
        }

        // Begin to count a call's seconds, which are the tests' own where a lab is graded.
        #watch(call) {
            const limit = call.payload?.timeLimit;
            if (limit) {
                this.#timer = setTimeout(() => {
                    const during = call.reading ? " at import" : call.test ? ` in ${call.test}` : "";
                    this.stop(`out of time: no end after ${limit} s${during}`);
                }, limit * 1000);
            }
        }

        #heard({ id, progress, event, error, fatal, result, memory }) {
            const call = this.#running;
            if (progress) {
                this.onprogress?.(progress);
            } else if (fatal) {
                this.stop(error);
            } else if (id === 0) {
                this.#begin(call);
            } else if (!call || id !== call.id) {
                return;
            } else if (event) {
                if (event.event === "collected") {
                    this.#watch(call);
                } else if (event.event === "start") {
                    call.test = event.test.split("::").pop();
                } else if (event.event === "reading") {
                    call.reading = event.on;
                }
                call.onEvent?.(event);
            } else {
                clearTimeout(this.#timer);
                this.#running = null;
                if (memory > LARGEST && !this.#kept) {
                    this.#end();
                }
                this.#set(this.#worker ? "ready" : "idle");
                if (error === undefined) {
                    call.resolve(result);
                } else {
                    call.reject(new Error(error));
                }
                this.#next();
            }
        }
    }

    let session = null;
    window.CoursePlay = {
        ready: Boolean(play) && location.protocol.startsWith("http") && "Worker" in window,
        session: () => (session ||= new Session()),
    };
})();
