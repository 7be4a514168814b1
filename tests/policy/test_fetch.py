"""Goal: what is fetched is the longest legal thing that is worth it. Method: drawn presence of pages and
tails against a model that tries every boundary; rates given by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.config import FETCH_POLICIES
from tiercel.errors import ConfigError
from tiercel.policy.fetch import (
    Costs,
    Fetching,
    GiveUp,
    Held,
    Keep,
    Moment,
    Rate,
    Refusal,
    Wanted,
    choose_fetch,
    make_fetch_policy,
    next_of,
    window,
)

PAGES = 12


def make_costs(*, window=1, replay=None, read=None, compute=None):
    costs = Costs(
        page_tokens=100, page_bytes=1000, tail_bytes=300, pages_per_window=window, replay_tokens=replay
    )
    if read:
        costs.read.observe(read, 1.0)
    if compute:
        costs.compute.observe(compute, 1.0)
    return costs


def chosen(*args, **options):
    wanted = choose_fetch(*args, **options)
    return wanted if isinstance(wanted, Refusal) else (wanted.upto, wanted.tails)


def make_held(*, boundary=0, found=0, stored=PAGES, tails=(), tails_stored=()):
    return Held(boundary, found, stored, frozenset(tails), frozenset(tails_stored))


@given(
    st.integers(0, PAGES),
    st.integers(0, PAGES),
    st.sets(st.integers(1, PAGES)),
    st.sets(st.integers(1, PAGES)),
    st.integers(0, 3),
)
def test_the_boundary_is_the_longest_at_which_everything_is_somewhere(found, stored, tails, more, window):
    near = {tail for tail in tails if tail <= found}
    last = min(PAGES, found + stored)

    def resumable(boundary, known):
        return all(b in known for b in range(max(1, boundary - window + 1), boundary + 1)) if window else True

    boundary = max(b for b in range(found + 1) if b == 0 or resumable(b, near))
    held = Held(boundary, found, last - found, frozenset(near), frozenset(more))
    wanted = choose_fetch(held, make_costs(window=window))
    legal_ones = [b for b in range(boundary + 1, last + 1) if resumable(b, near | more)]
    if not legal_ones:
        assert wanted is (Refusal.NO_TAIL if last > found else Refusal.NOTHING)
        return
    assert isinstance(wanted, Wanted) and wanted.upto == max(legal_ones[-1], found)
    assert wanted.rest is (Refusal.NO_TAIL if wanted.upto < last else None)
    needed = set(range(max(1, legal_ones[-1] - window + 1), legal_ones[-1] + 1)) if window else set()
    assert needed - near <= set(wanted.tails) <= more, "every tail the resume reads, none that is not there"


def test_what_is_not_fetched_has_a_reason():
    held = make_held(tails_stored={2, 4, 6})
    assert choose_fetch(held, make_costs(window=1)).rest is Refusal.NO_TAIL, "no tail after the sixth page"
    six = 6 * 1000 + 300
    assert choose_fetch(held, make_costs(window=1), bytes_most=six - 1).rest is Refusal.NO_ROOM
    assert choose_fetch(make_held(stored=6, tails_stored={6}), make_costs(window=1)).rest is None
    assert choose_fetch(make_held(stored=0), make_costs(window=1)) is Refusal.NOTHING


def test_a_text_without_tails_needs_none():
    assert chosen(make_held(), make_costs(window=0)) == (PAGES, ())


def test_a_tail_alone_is_fetched_where_the_pages_are_near():
    held = make_held(found=8, stored=0, tails_stored=[6])
    assert chosen(held, make_costs()) == (8, (6,))


def test_tails_on_the_way_are_fetched_so_that_an_early_end_is_worth_something_but_only_a_few():
    wanted = chosen(make_held(tails_stored=range(1, PAGES + 1)), make_costs())
    assert wanted == (12, (3, 6, 9, 12))


def test_pages_without_a_tail_are_fetched_where_a_replay_is_cheaper():
    held = make_held(tails_stored=[2])
    assert chosen(held, make_costs()) == (2, (2,))
    assert chosen(held, make_costs(replay=250)) == (PAGES, ())
    assert chosen(held, make_costs(replay=250, read=1e9, compute=1.0)) == (PAGES, ())
    assert chosen(held, make_costs(replay=1150, read=1e9, compute=1.0)) == (2, (2,))


@pytest.mark.parametrize(("read", "fetched"), [(1e6, True), (15_000, True), (9_000, False), (1, False)])
def test_the_cheaper_of_reading_and_computing_is_taken(read, fetched):
    """1,200 tokens at 1,000 a second against 12,300 bytes."""
    wanted = choose_fetch(make_held(tails_stored=[12]), make_costs(read=read, compute=1000))
    assert wanted is Refusal.SLOW if not fetched else isinstance(wanted, Wanted) and wanted.spared == 1200


def test_what_is_read_before_counts_and_so_does_the_time_a_request_waits_anyway():
    held, costs = make_held(tails_stored=[12]), make_costs(read=15_000, compute=1000)
    assert chosen(held, costs, bytes_ahead=20_000) is Refusal.SLOW
    assert chosen(held, costs, bytes_ahead=20_000, wait_s=2.0) == (12, (12,))


def test_part_of_it_is_fetched_where_there_is_no_room_for_all():
    held = make_held(tails_stored=[4, 12])
    assert chosen(held, make_costs(), bytes_most=6000) == (4, (4,))
    assert chosen(held, make_costs(), bytes_most=4000) is Refusal.NO_ROOM


def fetching(costs, *, bytes_left=0, still_s=0.0, left_s=1.0):
    return Fetching(costs, tokens=1000, bytes_left=bytes_left, waited_s=1.0, left_s=left_s, still_s=still_s)


def test_waiting_ends_when_computing_would_be_sooner_or_nothing_moves():
    costs = make_costs(read=1000, compute=1000)
    assert fetching(costs, bytes_left=900).worth_waiting
    assert not fetching(costs, bytes_left=1100).worth_waiting
    assert fetching(costs, still_s=0.2).worth_waiting
    assert not fetching(costs, still_s=0.3).worth_waiting
    assert fetching(make_costs(), bytes_left=10**9).worth_waiting, "nobody knows better"


@pytest.mark.parametrize(
    ("left_s", "still_s", "waiting"),
    [
        (0.1, 0.0, {"wait", "deadline"}),
        (0.0, 0.0, {"wait"}),
        (0.1, 0.3, {"wait"}),
    ],
)
def test_each_policy_waits_as_its_name_says(left_s, still_s, waiting):
    fetch = fetching(make_costs(read=1000, compute=1000), bytes_left=900, left_s=left_s, still_s=still_s)
    assert {name for name in FETCH_POLICIES if make_fetch_policy(name).waits(fetch)} == waiting


@pytest.mark.parametrize("name", ["no.such.module:Class", f"{__name__}:make_costs", f"{__name__}:Costs"])
def test_a_class_that_can_not_be_used_is_a_clear_error(name):
    with pytest.raises(ConfigError, match="fetch"):
        make_fetch_policy(name)


def test_a_rate_follows_what_it_sees_and_survives_nonsense():
    rate = Rate()
    assert rate.seconds(5) is None
    rate.observe(100, 1.0)
    assert rate.seconds(50) == 0.5
    for _ in range(20):
        rate.observe(10, 1.0)
    assert rate.seconds(10) == pytest.approx(1.0, rel=0.01)
    together = Rate()
    together.observe(100, 2.0)
    for _ in range(3):
        together.observe(100, 0.0)
    assert together.per_s == 200, "four that ended at the same moment"
    rate.observe(0, 0.0)
    rate.observe(0, 1e9)
    rate.observe(5, -1.0)
    assert 0 < rate.seconds(1) < float("inf")


def test_a_boundary_before_the_first_window_needs_only_the_tails_there_are():
    assert (*window(1, 3),) == (1,) and (*window(3, 3),) == (1, 2, 3) and (*window(5, 0),) == ()


# The whole decision

FAST, SLOW = make_costs(window=0, read=1e6, compute=100), make_costs(window=0, read=1e3, compute=1e6)
SOME, NONE = make_held(stored=4), make_held(stored=0)
IN_TIME, TOO_LATE = fetching(FAST, left_s=1.0), fetching(FAST, left_s=-1.0)
ALL_FOUR = Wanted(4, (), 400)


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        # The store has not answered, or reads are under way.
        (Moment(FAST), Keep()),
        (Moment(FAST, store_works=False), Keep()),
        (Moment(FAST, fetching=IN_TIME), Keep()),
        (Moment(FAST, fetching=TOO_LATE), GiveUp(Refusal.LATE)),
        # The store has said what it has.
        (Moment(FAST, held=SOME, bytes_most=4000), ALL_FOUR),
        (Moment(FAST, held=SOME, bytes_most=4000, fetching=IN_TIME), ALL_FOUR),
        (Moment(FAST, held=SOME, bytes_most=4000, fetching=TOO_LATE), GiveUp(Refusal.LATE)),
        (Moment(FAST, held=SOME, bytes_most=4000, store_works=False), GiveUp(Refusal.OFF)),
        (Moment(FAST, held=SOME, bytes_most=4000, other_brings=True), Keep()),
        (Moment(FAST, held=SOME, other_brings=True, store_works=False), GiveUp(Refusal.OFF)),
        (Moment(FAST, held=NONE, bytes_most=4000), GiveUp(Refusal.NOTHING)),
        (Moment(SLOW, held=SOME, bytes_most=4000), GiveUp(Refusal.SLOW)),
        (Moment(SLOW, held=SOME, bytes_most=4000, wait_s=9.0), ALL_FOUR),
        (Moment(FAST, held=SOME, bytes_most=4000, bytes_ahead=10**8), GiveUp(Refusal.SLOW)),
        # There is no room: that may change before the request's turn comes.
        (Moment(FAST, held=SOME, bytes_most=0), Keep()),
        (Moment(FAST, held=SOME, bytes_most=0, turn=True), GiveUp(Refusal.NO_ROOM)),
        (Moment(FAST, held=SOME, bytes_most=2000, turn=True), Wanted(2, (), 200, Refusal.NO_ROOM)),
    ],
)
def test_what_to_do_now_with_a_fetch(moment, expected):
    assert next_of(moment, make_fetch_policy("deadline")) == expected
