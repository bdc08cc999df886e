"""drafter: tokens that a model is about to say, guessed without a model.

Each run of the target model verifies up to four drafts: those that lead its own answer are kept,
and one more token comes with them. Good drafts need few runs.

`Answer(setup)` gets a prompt. `Answer.draft(tokens)` gets the tokens said since the last call, an
empty list at first, and returns 0 to 4 drafts of what comes next. The texts are edits: the
answer repeats much of the prompt with changes, in lines of a few kinds.

The score is the number of runs: fewer are better. A draft that does not fit costs nothing but its
chance.

vLLM's number is that of its own n-gram proposer with `prompt_lookup_min` 2 and
`prompt_lookup_max` 4: what followed the earliest of the longest matches.
"""


class Answer:
    """Drafts what followed the last token when it last occurred."""

    def __init__(self, setup):
        """Take the prompt.

        Args:
            setup: {"prompt": token ids, "k": most drafts}.
        """
        self.tokens = list(setup["prompt"])
        self.k = setup["k"]

    def draft(self, tokens):
        """At most `k` token ids, a list."""
        self.tokens += tokens
        last = self.tokens[-1]
        for at in range(len(self.tokens) - 2, -1, -1):
            if self.tokens[at] == last:
                return self.tokens[at + 1 : at + 1 + 1]
        return []
