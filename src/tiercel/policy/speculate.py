"""How many guesses a text gets in a step: as many as make tokens come faster, down to none.

    a step        its measured seconds for a number of rows: without guesses, and with guesses
    a guess       its measured chance to be accepted: for its text, starting from that of all texts

A guess is added if tokens per second rise with it; there are none if all of them together bring less than
`WORTH`, the share that can not be measured. Where no guess is worth it one is still tried now and then,
because texts and loads change. Trying costs less than `TRIED_SHARE` of the time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median_low

LEVELS_MOST = 8
"""The most guesses of one text in one step."""

WORTH = 1.02
"""The least gain: tokens per second over those without guesses. Steps of one kind differ by more."""

TRIED_SHARE = 0.005
"""The share of all time that trying may cost."""

TRIED_FIRST = 8
"""Tries at the start that are free: there is nothing to decide by."""

PLAIN_FIRST, PLAIN_EVERY, PLAIN_RUN = 16, 256, 6
"""While texts get guesses, some steps in a row have none, so that their time is known: the first after 16
steps, later ones less and less often, because the first steps of a process are slow."""

UNSETTLED = 2
"""This many steps after one with guesses do not count as steps without: a device is one step ahead only while
steps have no guesses. After a trial they are part of its cost."""

FORGET_TEXT, FORGET_ALL = 0.9, 0.998
"""The weight of a try after the next one: a text's last ten tries count, and the last 500 of all."""

FIRST = 0.6
"""The assumed chance of a guess before anything is known: high, so that guesses are tried."""

PRIOR_TRIES = 2.0
"""What is known of all texts counts as this number of tries of a text."""

MEASURED = 5
"""The median of the last measurements counts: a slow step is an accident."""

ROW_SHARE = 0.3
"""The assumed extra time of a step with twice the rows, as a share, before it is measured."""


@dataclass(slots=True)
class Tally:
    """How often something was true lately."""

    tries: float = 0.0
    hits: float = 0.0

    def add(self, hit: bool | float, forget: float) -> None:
        self.tries = self.tries * forget + 1.0
        self.hits = self.hits * forget + hit

    def rate(self, prior: float, weight: float) -> float:
        return (self.hits + prior * weight) / (self.tries + weight)


class SecondsTable:
    """Recently measured seconds for each count; between two counts and beyond them along a line. A count
    never takes longer than a larger one: a measurement that says so was an accident."""

    def __init__(self) -> None:
        self._measured: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._counts: list[int] = []

    def observe(self, count: int, seconds: float) -> None:
        if count not in self._measured:
            insort(self._counts, count)
            self._measured[count] = deque(maxlen=MEASURED)
        self._measured[count].append(seconds)
        self._medians[count] = median_low(self._measured[count])
        least = inf
        for each in reversed(self._counts):
            self._seconds[each] = least = min(least, self._medians[each])

    def above(self, count: int) -> float:
        """The seconds of the next larger count that was measured: `count` takes no longer."""
        right = bisect_left(self._counts, count)
        return self._seconds[self._counts[right]] if right < len(self._counts) else inf

    def at(self, count: float) -> float | None:
        counts = self._counts
        if not counts:
            return None
        right = bisect_left(counts, count)
        if right < len(counts) and counts[right] == count:
            return self._seconds[counts[right]]
        if len(counts) == 1:
            only = counts[0]
            return self._seconds[only] * max(0.0, 1.0 + ROW_SHARE * (count - only) / max(only, 1))
        right = min(max(right, 1), len(counts) - 1)
        low, high = counts[right - 1], counts[right]
        slope = (self._seconds[high] - self._seconds[low]) / (high - low)
        nearest = low if count < high else high
        return max(0.0, self._seconds[nearest] + slope * (count - nearest))


@dataclass
class GuessRecord:
    """How many guesses of one text were right."""

    levels: list[Tally] = field(default_factory=lambda: [Tally() for _ in range(LEVELS_MOST)])
    """Whether the first, second, … guess was accepted, where all before it were."""
    made: Tally = field(default_factory=Tally)
    """How many of the guesses that were asked for were made."""
    steps_without: int = 0
    """Steps since the text had a guess."""
    steps: int = 0
    """Steps with guesses."""
    tokens: int = 0
    """Tokens that these steps drew."""

    @property
    def accept_length(self) -> float | None:
        """Tokens per step; None: the text had no guesses."""
        return self.tokens / self.steps if self.steps else None


class Speculation:
    """Chooses guesses for all texts of a step, and learns from the results. It reads no clock."""

    def __init__(self) -> None:
        self._all = GuessRecord()
        self._plain, self._guessing, self._draft = SecondsTable(), SecondsTable(), SecondsTable()
        self._total_s = self._tried_s = 0.0
        self._tries = 0
        self._trial_s: float | None = None
        """While a guess is tried, and until steps are as before: the seconds of a step before the trial."""
        self._since_plain, self._plain_after, self._plain_run = 0, 0, 0

    def accepted(self, record: GuessRecord, *, asked: int, made: int, accepted: int) -> None:
        """Count how many guesses of a text were right. A guess that was asked for and not made counts as
        wrong."""
        record.steps += 1
        record.tokens += accepted + 1
        record.steps_without = 0
        for level in range(min(asked, accepted + 1)):
            for own, forget in ((record, FORGET_TEXT), (self._all, FORGET_ALL)):
                own.levels[level].add(level < accepted, forget)
        record.made.add(made / asked, FORGET_TEXT)
        self._all.made.add(made / asked, FORGET_ALL)

    def stepped(
        self, *, rows: int, seconds: float, texts: int = 0, asked: int = 0, draft_s: float = 0.0
    ) -> None:
        """A step with `rows` rows took `seconds`. `texts` texts had guesses, at most `asked` each; making
        them took `draft_s`."""
        self._total_s += seconds
        if self._trial_s is not None:
            self._tried_s += max(seconds - self._trial_s, 0.0)
        if asked:
            self._plain_run = 0
            self._since_plain += 1
            self._guessing.observe(rows, seconds - draft_s)
            self._draft.observe(texts, draft_s / asked)
            return
        self._plain_run += 1
        if self._plain_run > UNSETTLED:
            self._plain.observe(rows, seconds)
            self._trial_s = None
        if self._plain_run >= PLAIN_RUN and self._since_plain >= self._plain_after:
            self._since_plain = 0
            self._plain_after = min(max(2 * self._plain_after, PLAIN_FIRST), PLAIN_EVERY)

    def choose(self, records: Sequence[GuessRecord], most: Sequence[int], others: int = 0) -> list[int]:
        """How many guesses each text gets: at most `most[i]`. `others`: rows of the step besides one for each
        text; they count as tokens too."""
        chosen, rows = [0] * len(records), len(records) + others
        plain_s = self._plain.at(rows)
        if plain_s is None or self._since_plain >= self._plain_after:
            return chosen  # steps without guesses are measured first
        plain_s = min(plain_s, self._guessing.above(rows))  # the machine may have become faster meanwhile
        if plain_s > 0.0:
            chosen = self._fastest(records, most, rows, plain_s)
            if any(chosen):
                self._trial_s = None
        for record, count in zip(records, chosen, strict=True):
            record.steps_without += not count
        return self._with_trial(records, most, chosen, rows, plain_s)

    def _fastest(
        self, records: Sequence[GuessRecord], most: Sequence[int], rows: int, plain_s: float
    ) -> list[int]:
        """Level by level: how many texts get a first guess, how many of these a second one, …"""
        chosen = best = [0] * len(records)
        best_rate, tokens, draft_s, more = WORTH * rows / plain_s, float(rows), 0.0, 0.0
        likely, prior = dict.fromkeys(range(len(records)), 1.0), FIRST
        for level in range(max(most, default=0)):
            prior = self._all.levels[level].rate(prior, PRIOR_TRIES)  # unknown: as on the level before
            rates = ((p, i, records[i].levels[level]) for i, p in likely.items() if most[i] > level)
            gains = sorted(((p * own.rate(prior, PRIOR_TRIES), i) for p, i, own in rates), reverse=True)
            if not gains:
                break
            found = self._best_count(records, gains, rows, (tokens, draft_s, more))
            rate, count, tokens, draft_s, more = found
            likely = {i: gain for gain, i in gains[:count]}
            chosen = chosen.copy()
            for i in likely:
                chosen[i] = level + 1
            if rate > best_rate:
                best_rate, best = rate, chosen
        return best

    def _best_count(
        self,
        records: Sequence[GuessRecord],
        gains: Sequence[tuple[float, int]],
        rows: int,
        so_far: tuple[float, float, float],
    ) -> tuple[float, int, float, float, float]:
        """How many texts get one more guess, the likeliest first. Returns (tokens per second, texts, and of
        the whole step: tokens, seconds of guessing, rows more)."""
        (tokens, draft_s, more), made = so_far, self._all.made.rate(1.0, 1.0)
        found: tuple[float, int, float, float, float] | None = None
        for i, (gain, text) in enumerate(gains, 1):
            tokens += gain
            more += records[text].made.rate(made, PRIOR_TRIES)
            if i & (i - 1) and i != len(gains):
                continue  # 1, 2, 4, … texts, or all
            drafts = draft_s + (self._draft.at(i) or 0.0)
            seconds = self._guess_s(rows + more) + drafts
            rate = tokens / seconds if seconds > 0 else 0.0
            if found is None or rate > found[0]:
                found = rate, i, tokens, drafts, more
        assert found is not None
        return found

    def _guess_s(self, rows: float) -> float:
        seconds = self._guessing.at(rows)
        return (self._plain.at(rows) or 0.0) if seconds is None else seconds

    def _with_trial(
        self,
        records: Sequence[GuessRecord],
        most: Sequence[int],
        chosen: list[int],
        rows: int,
        plain_s: float,
    ) -> list[int]:
        """One guess for the text that had none for the longest time, if all trials together cost little."""
        left_out = [i for i, count in enumerate(chosen) if not count and most[i]]
        if not left_out:
            return chosen
        costs_s = max(self._guess_s(rows + 1) + (self._draft.at(1) or 0.0) - plain_s, 0.0)
        paid = self._tried_s + costs_s <= TRIED_SHARE * self._total_s
        if self._tries >= TRIED_FIRST and (self._trial_s is not None or not paid):
            return chosen
        self._tries += 1
        if any(chosen):
            self._tried_s += costs_s
        else:
            self._trial_s = plain_s
        first = max(left_out, key=lambda i: records[i].steps_without)
        chosen = chosen.copy()
        chosen[first] = 1
        return chosen
