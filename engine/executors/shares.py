"""Spreads the time of a pass with drafts over its tokens."""

from collections.abc import Generator, Iterator, Sequence

from ..model.executor import Token


def spread(tokens: Iterator[Token]) -> Generator[Token, None, None]:
    """Yields the tokens with new times. A pass chooses all its tokens at its end, so their time_s
    would not show how fast the answer is. Here each of a pass's n tokens gets 1/n of the time since
    the pass before. The last token of a pass keeps its time_s. The tokens of a pass are yielded
    together, when it has ended.

    Args:
        tokens: Executor.tokens(), or what a grammar makes of them.

    Raises:
        BaseException: What `tokens` raises, after the tokens that came before it.
    """
    before_s: float | None = None
    of_pass: list[Token] = []
    ends: BaseException | None = None
    while ends is None:
        try:
            of_pass.append(next(tokens))
        except BaseException as error:
            ends = error
        else:
            # After an accepted draft, the same pass chooses at least one more token.
            if of_pass[-1].is_draft and not of_pass[-1].end:
                continue
        yield from _shared(of_pass, before_s)
        before_s = of_pass[-1].time_s if of_pass else before_s
        of_pass = []
    if not isinstance(ends, StopIteration):
        raise ends


def _shared(of_pass: Sequence[Token], before_s: float | None) -> Iterator[Token]:
    if len(of_pass) < 2 or before_s is None:
        return iter(of_pass)
    took_s = of_pass[-1].time_s - before_s
    times = [before_s + took_s * number / len(of_pass) for number in range(1, len(of_pass))]
    return (
        token._replace(time_s=time_s)
        for token, time_s in zip(of_pass, [*times, of_pass[-1].time_s], strict=True)
    )
