"""The largest number that passes a test, where all larger ones fail it: which numbers to try, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

FIRST_SHARE = 32
"""The second number is a part of so many away from the first: of tensors the memory formula is within 3 %."""

MOST_ANSWERS = 2048


def tried(first: int, least: int, most: int, passes: Callable[[int], bool | None]) -> Iterator[int]:
    """The numbers from `least` to `most` that are tried, the last being one of which nothing is known.

    From `first` up while they pass, or down while they fail, each time twice as far; once one of each is
    known, the middle between them, until no number is left there. `passes` is None for a number that was not
    tried yet and for one that gave no answer: nothing comes after it.
    """
    number, low, high, distance = min(max(first, least), most), least - 1, most + 1, 0
    while high - low > 1:
        yield number
        answer = passes(number)
        if answer is None:
            return
        low, high = (number, high) if answer else (low, number)
        distance = 2 * distance or max(1, first // FIRST_SHARE)
        if high > most:
            number = min(low + distance, most)
        elif low < least:
            number = max(high - distance, least)
        else:
            number = (low + high) // 2


def fewest_and_most(first: int, least: int, most: int) -> tuple[int, int]:
    """How many numbers are tried in all, over the answers from `least` - 1 to `most`.

    Of very many answers some stand for all, whose neighbours may take one number more.
    """
    apart = max(1, (most - least) // MOST_ANSWERS)
    counts = [_count(first, least, most, answer) for answer in range(least - 1, most + 1, apart)]
    return min(counts), max(counts) + (apart > 1)


def _count(first: int, least: int, most: int, answer: int) -> int:
    return sum(1 for _ in tried(first, least, most, lambda number: number <= answer))
