"""A drafter in twenty lines (docs/adding-a-drafter.md). Run: python examples/own_drafter.py"""

from outrider import Engine, SamplingParams, load_target
from outrider.types import NO_DRAFT, Proposal


class LastTimeDrafter:
    """Proposes what followed the last token the last time it stood in this text."""

    name = "last-time"

    def start(self, sequence, tokens):
        pass

    def propose(self, requests):
        return [self._propose(request) for request in requests]

    def _propose(self, request):
        *before, last = request.tokens
        for at in range(len(before) - 1, -1, -1):
            if before[at] == last:
                copied = request.tokens[at + 1 : at + 1 + request.num_draft_tokens]
                return Proposal.chain(copied, drafter=self.name)
        return NO_DRAFT

    def observe(self, sequence, tokens, num_new):
        pass

    def finish(self, sequence):
        pass


def main(target, max_tokens=64):
    engine = Engine(target, drafter=LastTimeDrafter())
    [result] = engine.generate(
        ["Ten green bottles hanging on the wall, ten green"], SamplingParams(max_tokens=max_tokens)
    )
    print(result.text)
    print(f"{result.stats.tokens_per_pass:.2f} tokens a pass, {result.stats.accepted} draft tokens kept")
    return result


if __name__ == "__main__":
    main(load_target("smollm2-135m-instruct"))
