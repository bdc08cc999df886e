"""goodput: requests that keep two limits, under a policy of yours.

Requests arrive over time: short chats, and one long document in ten. A step computes at most
`budget` tokens of at most `running` requests, and takes the time that phase 03 measured for such a
step: more tokens take longer, for every request in it. A request keeps its limits if its first
token comes within `first` microseconds of its arrival, and each later token at most `gap`
microseconds after the one before.

`Answer.plan(now, waiting, running)` gets what is there and returns the step, a list of
`[name, tokens]`. A prompt may be computed in parts. A prompt's last part gives the first token;
after it a request computes one token a step. A request that was once in a step counts as running
until it has ended.

The score is the number of requests that keep both limits: more are better. A step that is empty,
over the budget, or gives a request more than it has left, scores nothing.

vLLM's number is that of its scheduler under the same budget: running requests first, then who
waited longest, prompts in chunks.
"""


class Answer:
    """First come, first served; a step is either prompts, whole, or the tokens of all others."""

    def __init__(self, setup):
        """Take the limits.

        Args:
            setup: {"budget", "running", "first", "gap", "cost"}; `cost` has nanoseconds of a step:
                `base`, per `token` computed, per token of `context` after the step, and per `pair`
                of a computed token and one that it sees.
        """
        self.setup = setup

    def plan(self, now, waiting, running):
        """The step that begins at `now`, microseconds.

        Args:
            waiting: [{"name", "arrival", "prompt"}, ...], in order of arrival.
            running: [{"name", "arrival", "prompt", "computed", "said", "last"}, ...], in order of
                their first step; `last` is when the last token came, `said` how many have.
        """
        budget, room = self.setup["budget"], self.setup["running"] - len(running)
        step = []
        for request in waiting[:room]:
            if request["prompt"] > budget:
                break
            budget -= request["prompt"]
            step.append([request["name"], request["prompt"]])
        return step or [[request["name"], 1] for request in running]
