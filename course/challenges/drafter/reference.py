"""Draft by draft: the most frequent continuation of the longest context seen, newest of equals."""

LONGEST = 8


class Answer:
    def __init__(self, setup):
        self.tokens = []
        self.k = setup["k"]
        self.after = {}  # the last n tokens: {next: (how often, when)}
        self._take(setup["prompt"])

    def _take(self, tokens):
        for token in tokens:
            for n in range(1, min(LONGEST, len(self.tokens)) + 1):
                seen = self.after.setdefault(tuple(self.tokens[-n:]), {})
                seen[token] = (seen.get(token, (0, 0))[0] + 1, len(self.tokens))
            self.tokens.append(token)

    def draft(self, tokens):
        self._take(tokens)
        context, drafts = self.tokens[-LONGEST:], []
        while len(drafts) < self.k:
            for n in range(min(LONGEST, len(context)), 0, -1):
                seen = self.after.get(tuple(context[-n:]))
                if seen:
                    best = max(seen, key=lambda t: seen[t] if n < 4 else (seen[t][1], 0))
                    break
            else:
                break
            drafts.append(best)
            context = [*context, best][-LONGEST:]
        return drafts
