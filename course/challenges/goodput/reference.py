"""Decodes all that run, and fills the step with prompts only as far as the gap allows.

Prompts go in order of what is left of them; one that cannot keep its limit any more waits for an
idle moment.
"""


class Answer:
    def __init__(self, setup):
        self.setup, self.cost = setup, setup["cost"]

    def plan(self, now, waiting, running):
        cost, setup = self.cost, self.setup
        step, time = [], cost["base"]
        budget = setup["budget"]
        decoding = [r for r in running if r["said"]]
        late = None
        for request in decoding:
            length = request["prompt"] + request["said"]
            time += cost["token"] + cost["context"] * length + cost["pair"] * length
            step.append([request["name"], 1])
            budget -= 1
            due = (request["last"] + setup["gap"] - now) * 1000
            if due > 0:
                late = due if late is None else min(late, due)
        limit = (late if late is not None else setup["gap"] * 1000) * 9 // 10
        room = setup["running"] - len(running)
        prompts = [(r, r["computed"]) for r in running if not r["said"]]
        prompts += [(r, 0) for r in waiting]

        def order(pair):
            request, computed = pair
            left = request["prompt"] - computed
            spent = now - request["arrival"]
            hopeless = spent + left * cost["token"] // 1000 > setup["first"]
            return hopeless, left, request["arrival"]

        for request, computed in sorted(prompts, key=order):
            started = "computed" in request
            if not started and not room:
                continue
            tokens, n, spent = request["prompt"] - computed, 0, 0
            while n < min(tokens, budget):
                more = min(8, tokens - n, budget - n)
                at = computed + n + more
                extra = more * (cost["token"] + cost["context"] + cost["pair"] * at)
                extra += cost["context"] * computed if n == 0 else 0
                if (step or n) and time + spent + extra > limit:
                    break
                n, spent = n + more, spent + extra
            if n:
                step.append([request["name"], n])
                time, budget = time + spent, budget - n
                room -= not started
            if n < tokens:
                break
        return step
