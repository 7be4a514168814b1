"""Goal: guesses are made where they make tokens come faster, and nowhere else. Method: steps of a scripted
machine, whose costs and whose texts are known; tokens per second with the policy and without guesses."""

from random import Random

import pytest

from tiercel.policy.speculate import GuessRecord, SecondsTable, Speculation, Tally


class Machine:
    """A step takes `base_s`, `row_s` for each row and `draft_s` for each level of guesses; `wait_s` more with
    guesses, or behind a step with guesses: such a step can not be queued before the last one has ended."""

    wait_s, alone = 0.0, True

    def __init__(self, texts, *, right, base_s=5e-3, row_s=0.5e-3, draft_s=0.0, noise=0.0, most=4, made=1.0):
        self.random, self.policy = Random(1), Speculation()
        self.records, self.right = [GuessRecord() for _ in range(texts)], right
        self.base_s, self.row_s, self.draft_s, self.noise = base_s, row_s, draft_s, noise
        self.most, self.made = most, made
        self.tokens = self.guesses = 0
        self.seconds = 0.0

    def step(self):
        texts = len(self.records)
        chosen = self.policy.choose(self.records, [self.most] * texts)
        rows = texts
        for i, (record, asked) in enumerate(zip(self.records, chosen, strict=True)):
            made = asked if self.random.random() < self.made else 0
            accepted = 0
            while accepted < made and self.random.random() < self.right[i % len(self.right)]:
                accepted += 1
            rows += made
            self.tokens += 1 + accepted
            self.guesses += made
            if asked:
                self.policy.accepted(record, asked=asked, made=made, accepted=accepted)
        drafts_s = max(chosen) * self.draft_s
        seconds = (self.base_s + rows * self.row_s) * (1 + self.noise * self.random.random()) + drafts_s
        seconds += self.wait_s * (self.alone or max(chosen) > 0)
        self.alone = max(chosen) > 0
        asked = [each for each in chosen if each]
        self.policy.stepped(rows=rows, seconds=seconds, texts=len(asked), asked=max(chosen), draft_s=drafts_s)
        self.seconds += seconds
        return chosen

    def speedup(self, steps=2000):
        """Tokens per second over those of steps without guesses."""
        for _ in range(steps):
            self.step()
        texts = len(self.records)
        plain = texts / ((self.base_s + texts * self.row_s) * (1 + self.noise / 2))
        return self.tokens / self.seconds / plain


@pytest.mark.parametrize("texts", [1, 16, 64])
@pytest.mark.parametrize("draft_s", [0.0, 1.5e-3])
def test_what_can_not_be_guessed_costs_next_to_nothing(texts, draft_s):
    assert Machine(texts, right=[0.02], draft_s=draft_s).speedup() > 0.985


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_cheap_guesses_that_are_right_are_made(noise):
    assert Machine(1, right=[0.9], noise=noise).speedup() > 2.5
    assert Machine(1, right=[0.6], noise=noise, draft_s=1e-3).speedup() > 1.15


def test_guesses_that_cost_more_than_they_bring_are_not_made():
    """64 rows keep the machine busy: a guess costs as much as a token, and is right less often."""
    machine = Machine(64, right=[0.7], base_s=1e-3)
    assert machine.speedup() > 0.985
    assert machine.guesses < 0.02 * machine.tokens


def test_guesses_that_keep_a_device_waiting_are_not_made():
    """They are right, and a step with them draws twice the tokens; it takes three times as long."""
    machine = Machine(1, right=[0.95], base_s=0.4e-3, row_s=0.01e-3, most=1)
    machine.wait_s = 0.8e-3
    assert machine.speedup() > 0.98


def test_each_text_gets_what_it_is_worth():
    machine = Machine(4, right=[0.95, 0.02], base_s=4e-3)
    machine.speedup(500)
    last = [machine.step() for _ in range(50)]
    likely, unlikely = (sum(sum(each[i::2]) for each in last) for i in (0, 1))
    assert likely > 5 * unlikely


def test_a_text_that_can_be_guessed_again_is_found_out():
    machine = Machine(1, right=[0.0])
    machine.speedup(1000)
    machine.right, machine.tokens, machine.seconds = [0.95], 0, 0.0
    assert machine.speedup(1000) > 1.8


def test_guesses_stop_when_steps_with_them_become_slow():
    machine = Machine(1, right=[0.6])
    assert machine.speedup(500) > 1.2
    machine.row_s, machine.tokens, machine.seconds = 20e-3, 0, 0.0
    assert machine.speedup(2000) > 0.97


def test_asking_in_vain_is_no_loss_where_it_is_free():
    assert Machine(1, right=[0.9], made=0.1).speedup() > 1.05


def test_no_text_gets_more_than_there_is_room_for():
    machine, policy = Machine(2, right=[1.0]), None
    machine.speedup(50)
    policy = machine.policy
    assert policy.choose(machine.records, [0, 1])[0] == 0
    assert all(count <= 1 for count in policy.choose(machine.records, [1, 1]))
    assert policy.choose([], []) == []


def test_seconds_lie_on_lines_between_what_was_measured():
    table = SecondsTable()
    assert table.at(3) is None
    table.observe(2, 1.0)
    assert table.at(2) == 1.0 < table.at(3) < 2.0
    table.observe(4, 3.0)
    assert (table.at(3), table.at(2.5), table.at(5), table.at(1)) == (2.0, 1.5, 4.0, 0.0)
    for _ in range(5):
        table.observe(2, 2.0)
    table.observe(2, 1000.0)
    assert table.at(2) == 2.0, "one slow step is an accident"
    table.observe(3, 1000.0)
    assert table.at(3) == 3.0, "three do not take longer than four"


def test_what_came_true_lately_counts_more():
    tally = Tally()
    assert tally.rate(0.5, 2.0) == 0.5
    for hit in [False] * 30 + [True] * 30:
        tally.add(hit, 0.9)
    assert tally.rate(0.5, 2.0) > 0.85
    record = GuessRecord()
    assert record.accept_length is None
    Speculation().accepted(record, asked=3, made=2, accepted=1)
    assert record.accept_length == 2.0
