"""Goal: what `TieredCache` promises a caller, one promise per test. Method: a tiny declaration, bytes that
name their text."""

import time
from unittest.mock import patch

import pytest

from tests.simulation.bytes import Bytes, text_of
from tests.simulation.copies import HeldCopies
from tests.simulation.specs import SPECS
from tiercel.cache import Loaded, Request, RequestState, TieredCache, Wait, WaitFor
from tiercel.cache.audit import PoolStats
from tiercel.cache.memories import Memories, make_memories
from tiercel.cache.residency import LEAST
from tiercel.config import CacheConfig
from tiercel.errors import BudgetError, ConfigError
from tiercel.policy.resume import Why
from tiercel.transfer.plan import Direction
from tiercel.types import Tier

PLAIN, WINDOW, LONG, V4 = (
    SPECS["full attention"],
    SPECS["short window"],
    SPECS["long window"],
    SPECS["compressed"],
)


class Driver:
    """A cache and a one-request-at-a-time engine that writes bytes which name their text."""

    def __init__(self, spec=PLAIN, *, host_pages=40, held=False, identity=None, **settings):
        beside = -(-4 * spec.pages_per_window * spec.units_per_tail // spec.frame_units)
        settings = {"device_pages": 8, "staging_tails": spec.pages_per_window} | settings
        settings["device_pages"] += beside  # a place for each page, and those of four tails
        self.copies = {direction: HeldCopies() for direction in Direction}
        self.spec = spec
        config = CacheConfig(host_bytes=host_pages * spec.place_bytes, **settings)
        memories = make_memories(spec, config, executors=self.copies if held else None)
        self.cache = TieredCache(spec, config, memories, identity=identity)
        self.bytes = Bytes(spec, self.cache.device)

    def begin(self, tokens, namespace=(), **options):
        return self.cache.begin(self.cache.chain(tokens, namespace), **options)

    def begin_loaded(self, tokens, namespace=(), **options):
        request = self.begin(tokens, namespace, **options)
        self.settle()
        if isinstance(request, Wait):
            request = self.begin(tokens, namespace, **options)
        assert isinstance(request, Request), request
        self.settle()
        assert request.state is RequestState.RUNNING
        self.check_bytes(request, tokens, namespace)
        return request

    def compute(self, request, tokens, namespace=(), upto=None):
        size, page_tokens = upto or len(tokens), self.spec.page_tokens
        outcome = self.cache.extend(request, size)
        for _ in range(5):
            if isinstance(outcome, Wait):
                self.settle()
                outcome = self.cache.extend(request, size)
        assert not isinstance(outcome, Wait), outcome
        keys = request.chain.keys
        for page in range(request.committed, size // page_tokens):
            text = text_of(namespace, tokens[: (page + 1) * page_tokens])
            self.bytes.write(request.table[page], keys[page], text, tail=False)
        for boundary, tail in outcome.tails.items():
            key = keys[boundary // page_tokens - 1]
            self.bytes.write(tail, key, text_of(namespace, tokens[:boundary]), tail=True)
        self.cache.commit(request, size)
        return outcome

    def serve(self, tokens, namespace=(), **options):
        """A whole request; answers what it reused."""
        request = self.begin_loaded(tokens, namespace, **options)
        self.compute(request, tokens, namespace)
        self.cache.finish(request)
        self.settle()
        return request.reuse

    def check_bytes(self, request, tokens, namespace=()):
        for page in range(request.committed):
            text = text_of(namespace, tokens[: (page + 1) * self.spec.page_tokens])
            self.bytes.check(request.table[page], text, tail=False, who="the page table")
        for tail in request.resume_tails:
            text = text_of(namespace, tokens[: tail.page.depth * self.spec.page_tokens])
            self.bytes.check(tail.device, text, tail=True, who="a tail to resume from")

    def settle(self):
        """Until nothing is on its way."""
        while self.cache.flights.busy:
            self.cache.step()
            for copies in self.copies.values():
                while copies.held:
                    copies.run(0)
            time.sleep(0)
        self.cache.check()

    def push_out(self, pages=8):
        """Fill the device with another text of so many pages, so that everything else leaves it; with tails,
        take the places for a moment."""
        if not self.spec.tail_streams:
            self.serve([9] * (pages * self.spec.page_tokens))
            return
        for _ in range(9):
            room = self.cache.places.reserve(self, self.cache.config.device_pages - 8 + pages)
            if not isinstance(room, Wait):
                with room:
                    return
            self.cache.step()
            self.settle()
        raise AssertionError(room)


def make(spec=PLAIN, **settings):
    return Driver(spec, **settings)


# A text leaves the device by name


@pytest.mark.parametrize("spec", [PLAIN, WINDOW, V4], ids=["plain", "window", "compressed"])
@pytest.mark.parametrize("evict", ["value", "lru"])
def test_a_text_that_leaves_the_device_by_name_comes_from_the_host(spec, evict):
    driver, one, other = make(spec, evict=evict), [1] * 4 * spec.page_tokens, [2] * 2 * spec.page_tokens
    for text in (one, other):
        driver.serve(text)
    for _ in range(2):
        assert driver.cache.leave_device(driver.cache.chain(one)) == 0
        driver.cache.check()
        assert driver.begin_loaded([*other, 3]).reuse.device_tokens == len(other), "nobody else leaves"
        driver.cache.abort(next(iter(driver.cache.requests)))
        found = driver.serve([*one, 3])
        assert (found.device_tokens, found.host_tokens) == (0, len(one))


def test_what_somebody_uses_or_the_host_lacks_stays_on_the_device():
    driver = make(held=True)
    text = [1] * 4 * PLAIN.page_tokens
    driver.compute(request := driver.begin_loaded(text), text)
    driver.cache.finish(request)
    chain = driver.cache.chain(text)
    assert driver.cache.leave_device(chain) == 4, "the saves have not ended"
    driver.settle()
    request = driver.begin_loaded([*text[: 2 * PLAIN.page_tokens], 5])
    assert driver.cache.leave_device(chain) == 2, "a request holds two of them"
    driver.cache.finish(request)
    assert driver.cache.leave_device(chain) == 0
    assert driver.cache.leave_device(driver.cache.chain([7] * 9)) == 0, "nobody knows it"
    driver.settle()


TEXT = list(range(18))
"""Four full pages of four tokens, and two tokens more."""


@pytest.mark.parametrize(("budget", "plans"), [(1, [1] * 9), (5 * PLAIN.page_bytes, [5, 4]), (1 << 20, [9])])
def test_saves_start_oldest_first_within_the_budget_of_a_step(budget, plans):
    driver = make(held=True, save_step_bytes=budget, device_pages=16)
    computed = []
    for number, pages in enumerate((2, 3, 4)):
        request = driver.begin([number] * 4 * pages)
        driver.compute(request, [number] * 4 * pages)
        computed += request.table
        driver.cache.finish(request)
    for _ in range(10):
        driver.cache.step()
    sent = [plan_of(task).legs[0].device for _, task in driver.copies[Direction.SAVE].held]
    assert list(map(len, sent)) == plans and [page for leg in sent for (page,) in leg] == computed
    driver.settle()
    assert driver.cache.counters["pages_saved"] == 9


def plan_of(task):
    """The plan that a held copy is to carry out."""
    return next(cell.cell_contents for cell in task.__closure__ if isinstance(cell.cell_contents, tuple))[1]


# What is reused


def test_a_cache_takes_over_the_device_memory_of_the_one_before_it_and_knows_nothing_of_its_pages():
    first = Driver(WINDOW)
    request = first.begin_loaded(range(12))
    first.compute(request, range(12))
    first.cache.finish(request)
    first.settle()
    config = CacheConfig(device_pages=6, staging_tails=1)
    second = TieredCache(WINDOW, config, make_memories(WINDOW, config, first.cache.device))
    assert second.device is first.cache.device and second.pages.capacity == 6
    found = second.begin(second.chain(range(12)))
    assert isinstance(found, Request) and found.reuse.tokens == 0
    second.abort(found)
    second.check()
    with pytest.raises(AssertionError, match="places"):
        TieredCache(WINDOW, CacheConfig(device_pages=99, staging_tails=4), Memories(first.cache.device))


def test_a_text_seen_before_comes_from_the_device():
    driver = make()
    assert driver.serve(TEXT).tokens == 0
    reuse = driver.serve(TEXT)
    assert (reuse.device_tokens, reuse.host_tokens, reuse.why) == (16, 0, Why.COMPLETE)


def test_a_text_that_left_the_device_comes_back_from_the_host_bit_by_bit():
    driver = make()
    driver.serve(TEXT)
    driver.push_out()
    reuse = driver.serve(TEXT)
    assert (reuse.device_tokens, reuse.host_tokens, reuse.why) == (0, 16, Why.COMPLETE)


def test_a_text_half_on_the_device_comes_from_both():
    driver = make()
    driver.serve(TEXT)
    driver.push_out(pages=6)
    reuse = driver.serve(TEXT)
    assert (reuse.device_tokens, reuse.host_tokens) == (8, 8)


def test_the_last_token_is_always_computed():
    driver = make()
    driver.serve(TEXT[:16])
    reuse = driver.serve(TEXT[:16])
    assert reuse.tokens == 12 and reuse.why is Why.COMPLETE


def test_namespaces_share_nothing():
    driver = make()
    driver.serve(TEXT, ("a", "bc"))
    for other in [("ab", "c"), ("abc",), ()]:
        assert driver.begin(TEXT, other).reuse.tokens == 0
    assert driver.begin(TEXT, ("a", "bc")).reuse.tokens == 16


@pytest.mark.parametrize("save", ["through", "selective", "back"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_kind_of_stream_survives_the_host_under_every_save_policy(spec, save):
    driver = make(SPECS[spec], save=save)
    driver.serve(TEXT)
    assert driver.serve(TEXT).tokens == 16
    driver.push_out()
    reuse = driver.serve(TEXT)
    assert (reuse.device_tokens, reuse.host_tokens) == (0, 16)


def test_turning_the_host_off_changes_speed_only():
    driver = make(host_pages=0)
    driver.serve(TEXT)
    driver.push_out()
    reuse = driver.serve(TEXT)
    assert reuse.tokens == 0 and reuse.why is Why.NOT_CACHED


# Why not more


def test_a_text_that_differs_stops_at_the_difference():
    driver = make()
    driver.serve(TEXT)
    reuse = driver.serve([*TEXT[:9], 99, *TEXT[10:]])
    assert reuse.tokens == 8 and reuse.why is Why.NOT_CACHED


def test_without_its_last_tail_a_text_resumes_from_an_earlier_one():
    driver = make(WINDOW, tail_every_pages=2)
    driver.serve(TEXT)
    tree = driver.cache.tree
    (last,) = [page for page in tree.index.values() if page.depth == 4]
    assert last.tail is not None
    tree.copies.drop(last.tail)
    reuse = driver.serve(TEXT)
    assert reuse.tokens == 8 and reuse.found_tokens == 16 and reuse.why is Why.NO_TAIL
    assert reuse.replay_cost_tokens == WINDOW.replay_tokens == 3
    assert "16 tokens found" in str(reuse)


def test_an_exact_replay_uses_every_page_and_leaves_a_tail_where_it_ends():
    driver = make(WINDOW, tail_every_pages=9)
    driver.serve(TEXT)
    tree = driver.cache.tree
    for page in list(tree.index.values()):
        if page.tail is not None:
            tree.copies.drop(page.tail)
    request = driver.begin_loaded(TEXT, replay=True)
    assert request.reuse.tokens == 16 and request.reuse.replay_tokens == 3 and request.resume_tails == ()
    driver.compute(request, TEXT)
    driver.cache.finish(request)
    assert boundaries(driver) == [4]
    reuse = driver.serve([*TEXT[:16], *[8] * 9], replay=True)
    assert reuse.tokens == 16 and reuse.replay_tokens == 0


def test_no_replay_rebuilds_a_recurrent_state():
    driver = make(SPECS["recurrent"], tail_every_pages=9)
    driver.serve(TEXT)
    for page in list(driver.cache.tree.index.values()):
        if page.tail is not None:
            driver.cache.tree.copies.drop(page.tail)
    reuse = driver.serve(TEXT, replay=True)
    assert reuse.tokens == 0 and reuse.replay_cost_tokens is None and reuse.why is Why.NO_TAIL


def test_a_request_may_refuse_loads():
    driver = make()
    driver.serve(TEXT)
    driver.push_out(pages=6)
    reuse = driver.serve(TEXT, load=False)
    assert (reuse.device_tokens, reuse.host_tokens, reuse.why) == (8, 0, Why.NOT_ON_DEVICE)


def test_a_cache_told_to_miss_finds_nothing():
    driver = make(force_miss=True)
    driver.serve(TEXT)
    reuse = driver.serve(TEXT)
    assert reuse.tokens == 0 and reuse.why is Why.FORCED_MISS


# Tails


def test_tails_stand_at_message_ends_the_prompt_end_and_branch_points():
    driver = make(WINDOW, tail_every_pages=99, device_pages=16, staging_tails=8)
    driver.serve(TEXT, turn_ends=[7])
    assert boundaries(driver) == [1, 4]
    driver.serve(TEXT[:12] + [50] * 6)
    assert boundaries(driver) == [1, 3, 4, 4], "three pages are shared: a tail where the texts part"
    assert driver.begin(TEXT[:12] + [60] * 6).reuse.tokens == 12


def test_the_end_of_the_answer_gets_a_tail_and_the_boundaries_before_it_do_not():
    driver = make(WINDOW, tail_every_pages=99)
    tokens = TEXT[:6]
    request = driver.begin_loaded(tokens)
    driver.compute(request, tokens)
    for token in TEXT[6:]:
        tokens = [*tokens, token]
        request.chain.extend([token])
        driver.compute(request, tokens)
        assert len(request.tails) <= 1
    driver.cache.finish(request)
    driver.settle()
    assert boundaries(driver) == [1, 4]
    assert driver.serve([*TEXT, 1, 2]).tokens == 16


@pytest.mark.parametrize("evict", ["value", "lru", "slru"])
def test_a_text_keeps_its_last_tails(evict):
    driver = make(WINDOW, tail_every_pages=1, device_pages=40, evict=evict)
    driver.serve(range(33))
    assert boundaries(driver) == [5, 6, 7, 8]


def test_a_window_of_three_pages_keeps_three_tails_and_resumes():
    driver = make(LONG, tail_every_pages=99)
    driver.serve(TEXT)
    assert boundaries(driver) == [2, 3, 4]
    request = driver.begin_loaded([*TEXT, 1])
    assert request.reuse.tokens == 16 and len(request.resume_tails) == 3


def test_no_tail_is_skipped_on_the_smallest_device_that_holds_the_text():
    driver = make(WINDOW, device_pages=3, tail_every_pages=1)
    assert driver.cache.pages_most == 5, "four full pages and one that is not"
    request = driver.begin_loaded(TEXT)
    for upto in (*range(4, 17, 4), 18):
        driver.compute(request, TEXT, upto=upto)
    driver.cache.finish(request)
    assert boundaries(driver) == [1, 2, 3, 4]


def test_a_request_waits_for_the_place_of_a_tail_as_for_that_of_a_page():
    driver = make(WINDOW, device_pages=1, tail_every_pages=1, host_pages=0)
    first, second = driver.begin_loaded([7] * 9), driver.begin_loaded([8] * 5)
    driver.cache.extend(first, 9)
    assert driver.cache.pages.free == 0
    assert driver.cache.extend(second, 5) == Wait(WaitFor.DEVICE_PAGES, 3)
    driver.cache.abort(first)
    assert list(driver.cache.extend(second, 5).tails) == [4]


def test_a_text_begins_only_if_there_is_room_for_its_first_tail_as_well():
    driver = make(WINDOW, device_pages=1, tail_every_pages=99, host_pages=0)
    first = driver.begin_loaded([7] * 9, room_for=9)
    free = driver.cache.pages.free
    assert free == 2, "room for two pages, or for one page and its tail"
    assert driver.begin([8] * 5, room_for=5) == Wait(WaitFor.DEVICE_PAGES, 1)
    second = driver.begin([8] * 3, room_for=3)
    assert isinstance(second, Request) and driver.cache.pages.free == free - 1, "nothing is kept for the tail"
    for request in (first, second):
        driver.cache.abort(request)


def test_pages_that_become_sparse_are_on_the_host_as_long_as_a_text_reads_them():
    driver = make(SPECS["two pools"], held=False, staged_pages=8)
    driver.serve(TEXT)
    request = driver.begin_loaded(TEXT)
    pages = [driver.cache.tree.index[key] for key in request.chain.keys[:4]]
    wide = len(driver.cache.pages.owned_ids())
    driver.cache.residency.leave(pages[:3], LEAST)
    assert len(request.hot) == driver.spec.hot_places()[0] == 2
    assert len(driver.cache.pages.owned_ids()) == wide - 3 + 2, "two of the three places are for hot rows"
    assert [len(places) for places in request.table[:4]] == [1, 1, 1, 2] and request.changed == {0, 1, 2}
    first, second, host = driver.cache.residency.rows(request, 0, request.table[:4])
    assert min(first) >= 0 and second[:3] == (-1, -1, -1) and min(host[:3]) >= 0 and host[3] == -1
    while driver.cache.tree.evict_host():
        pass
    assert [page.on_host for page in pages] == [True, True, True, False], "only the last one was a double"
    driver.cache.places.settle()
    driver.cache.check()
    driver.cache.finish(request)
    assert len(driver.cache.pages.owned_ids()) == wide - 3


def test_a_page_that_comes_back_takes_no_hot_rows_that_guesses_need():
    driver = make(SPECS["two pools"], staged_pages=8)
    driver.serve(TEXT)
    request, residency, pages = driver.begin_loaded(TEXT), driver.cache.residency, driver.cache.pages
    residency.guesses_max = 1
    shared = [driver.cache.tree.index[key] for key in request.chain.keys[:4]]
    residency.leave(shared, residency.hot[0])
    assert len(request.hot) == 3 and residency.guesses_of(request) == 1
    for left in (3, 2):
        residency._whole(shared[left], pages.take(0, 1)[0])
        assert len(request.sparse) == len(request.hot) == left, "a row for each sparse page is enough"
        assert residency.guesses_of(request) == 1
    driver.cache.check()
    driver.cache.finish(request)


def test_places_that_a_step_under_way_reads_come_free_when_it_has_ended():
    driver = make(SPECS["two pools"], staged_pages=8)
    driver.serve(TEXT)
    request, residency = driver.begin_loaded(TEXT), driver.cache.residency
    owned, steps = len(driver.cache.pages.owned_ids()), ["under way", "under way"]
    residency.under_way = lambda: len(steps)
    assert residency.make_room(1)
    assert len(request.sparse) == 4 and len(request.hot) == 2
    assert len(driver.cache.pages.owned_ids()) == owned and driver.cache.pages.leaving == 2
    for leaving in (2, 0):
        residency.advanced()
        steps.pop()
        assert driver.cache.pages.leaving == leaving
    assert len(driver.cache.pages.owned_ids()) == owned - 2
    driver.cache.check()
    driver.cache.finish(request)


def test_a_text_that_is_loaded_sparse_takes_no_place_in_the_second_pool():
    driver = make(SPECS["two pools"], device_pages=12, sparse="always", staged_pages=8)
    driver.serve(TEXT)
    assert driver.cache.leave_device(driver.cache.chain(TEXT)) == 0
    request = driver.begin_loaded(TEXT)
    assert [len(places) for places in request.table] == [1] * 4 and request.reuse.host_tokens == 16
    assert len(request.hot) == 2, "but for its hot rows"
    driver.cache.finish(request)


def test_no_more_leaves_than_frees_a_body_while_it_is_being_saved():
    driver = make(SPECS["two pools"], held=True, device_pages=8, save="back", tail_every_pages=99)
    for n in range(3):
        driver.serve([n] * 17)
    cache, request = driver.cache, driver.begin_loaded([9])
    while not isinstance(waits := cache.extend(request, len(request.table) * 4 + 1), Wait):
        assert cache.pages.leaving == 0
    assert waits.what is WaitFor.LEAVING
    left = cache.pages.leaving
    for _ in range(3):
        assert cache.extend(request, len(request.table) * 4 + 1) == waits and cache.pages.leaving == left
    driver.settle()
    assert not isinstance(cache.extend(request, len(request.table) * 4 + 1), Wait)


def test_a_text_whose_own_units_break_the_frames_that_it_needs_is_packed_when_it_begins():
    driver = make(SPECS["two pools"], device_pages=4, sparse="off")
    cache, pages = driver.cache, driver.cache.pages
    heads, units = pages.take(9), pages.take(21)
    pages.release(units[::3])  # one unit of each broken body
    with patch.object(cache, "check"):  # it would miss the owners of these
        driver.serve(TEXT[:5])
    pages.release([each for each in (*heads, *units) if pages.own([each])])
    assert pages.free == 9 * 4 - 4 - 5 and pages.lack(0, 3) == 1, (
        "its page and its tail stand in seven frames"
    )
    wanted = [*TEXT, *range(60, 66)]
    assert cache.begin(cache.chain(wanted), room_for=24) == Wait(WaitFor.LEAVING, 6)
    request = driver.begin_loaded(wanted, room_for=24)
    assert request.reuse.tokens == 4 and len(request.table) == 6, "its tail left, and has come back"
    cache.abort(request)
    cache.check()


@pytest.mark.parametrize(("staged_pages", "whole"), [(5, True), (6, False)])
def test_way_is_made_for_as_many_whole_pages_as_a_text_needs(staged_pages, whole):
    """A text of six pages that may all be sparse needs two places for what it computes, and two for hot
    rows."""
    driver = make(SPECS["two pools"], staged_pages=staged_pages)
    for number in range(10, 20):
        driver.serve([number] * 16)
    cache, pages = driver.cache, driver.cache.pages
    assert pages.lack(0, 2) > 0, "the device is full of other texts"
    found = cache.find(cache.chain(range(24)))
    for _ in range(2):  # what leaves is saved first
        assert cache.room.make_way(found, 24).what is WaitFor.LEAVING
        driver.settle()
    assert (pages.lack(0, 6) <= 0) is whole


def test_a_tail_that_a_text_keeps_for_itself_goes_to_the_host_before_others_wait():
    driver = make(WINDOW, device_pages=2, tail_every_pages=99)
    first = driver.begin_loaded([7] * 4)
    driver.compute(first, [7] * 9, upto=4)
    first.chain.extend([7] * 5)
    driver.compute(first, [7] * 9, upto=9)
    assert list(first.tails) == [2], "no prompt ends there: the text keeps it until it ends"
    other = driver.begin_loaded([8] * 5)
    room = driver.cache.extend(other, 5)
    assert room == Wait(WaitFor.LEAVING, 1) and not first.tails
    driver.settle()
    assert not isinstance(driver.cache.extend(other, 5), Wait)
    tail = driver.cache.tree.index[first.chain.keys[1]].tail
    assert tail.on_host and tail.device is None
    driver.cache.finish(first)
    driver.cache.abort(other)
    driver.settle()
    assert driver.serve([7] * 9).tokens == 8


@pytest.mark.parametrize("save", ["through", "back"])
def test_the_last_tail_of_every_text_is_kept_also_when_the_host_is_full(save):
    driver = make(WINDOW, host_pages=12, save=save, tail_every_pages=99, device_pages=6)
    for n in range(30):
        driver.serve([n] * 9)
        driver.cache.step()
        last = driver.cache.tree.index[driver.cache.chain([n] * 9).keys[-1]]
        assert last.tail is not None


def boundaries(driver):
    return sorted(page.depth for page in driver.cache.tree.index.values() if page.tail is not None)


# Saving


def test_through_saves_what_is_committed():
    driver = make()
    request = driver.begin_loaded(TEXT)
    driver.compute(request, TEXT)
    driver.settle()
    assert on_host(driver) == 4
    assert driver.cache.counters["saves"] == 1, "four pages, one submission"


def test_selective_saves_what_is_used_a_second_time():
    driver = make(save="selective")
    driver.serve(TEXT)
    assert on_host(driver) == 0
    driver.serve(TEXT)
    assert on_host(driver) == 4


def test_selective_saves_what_leaves_the_device_though_it_was_never_found():
    driver = make(save="selective")
    driver.serve(TEXT)
    driver.push_out()
    assert driver.serve(TEXT).host_tokens == 16


@pytest.mark.parametrize("save", ["through", "selective", "back"])
def test_nothing_is_copied_for_an_owner_that_may_keep_nothing(save):
    driver = make(save=save)
    cache = driver.cache
    cache.limit("none", 0)
    for _ in range(2):
        request = cache.begin(cache.chain(TEXT, ("none",), "none"))
        driver.compute(request, TEXT, ("none",))
        other = driver.begin([9] * 16, room_for=16)
        assert isinstance(other, Wait), "its pages are in use"
        cache.finish(request)
        driver.settle()
    assert cache.counters["pages_saved"] == 0


def test_back_saves_what_leaves_the_device():
    driver = make(save="back")
    driver.serve(TEXT)
    driver.serve(TEXT)
    assert on_host(driver) == 0
    driver.push_out(pages=6)
    assert on_host(driver) == 2


def test_a_copy_of_what_the_device_holds_never_displaces_the_only_copy_of_something():
    driver = make(host_pages=4)
    driver.serve(TEXT)
    driver.push_out()
    assert on_host(driver) == 4, "the host is full of the first text, now its only home"
    match = driver.cache.tree.match(driver.cache.chain(TEXT).keys, 4)
    assert (match.found, match.device) == (4, 0)


def on_host(driver):
    return sum(page.on_host for page in driver.cache.tree.index.values())


# Loading


def test_requests_of_one_step_share_one_load():
    driver = make(held=True)
    driver.serve(TEXT)
    driver.push_out()
    first, second = driver.begin(TEXT), driver.begin(TEXT)
    loads = driver.cache.counters["loads"]
    assert first.state is second.state is RequestState.LOADING and first.table == second.table
    driver.settle()
    assert first.state is second.state is RequestState.RUNNING
    assert driver.cache.counters["loads"] == loads + 1 and driver.cache.counters["pages_loaded"] == 4


def test_a_request_that_comes_while_a_load_is_under_way_waits_for_it():
    driver = make(held=True)
    driver.serve(TEXT)
    driver.push_out()
    driver.begin(TEXT)
    driver.cache.step()
    assert driver.begin(TEXT) == Wait(WaitFor.ARRIVING)
    driver.settle()
    assert driver.begin(TEXT).reuse.device_tokens == 16


def test_a_request_that_wants_what_is_leaving_waits_for_it():
    driver = make(held=True, save="back", device_pages=5)
    driver.serve(TEXT)
    request = driver.begin([9] * 18)
    assert driver.cache.extend(request, 12) == Wait(WaitFor.LEAVING, 2)
    assert driver.begin(TEXT) == Wait(WaitFor.ARRIVING)
    assert driver.begin(TEXT[:10]).reuse.device_tokens == 8, "its pages have not left"
    driver.settle()
    assert driver.begin(TEXT).reuse.host_tokens == 8


def test_a_request_is_told_when_its_load_has_landed():
    driver = make(held=True)
    driver.serve(TEXT)
    driver.push_out()
    request = driver.begin(TEXT)
    assert driver.cache.step() == []
    driver.copies[Direction.LOAD].run(0)
    assert driver.cache.step() == [Loaded(request)]


def test_many_loads_may_be_under_way_at_once():
    driver = make(held=True, device_pages=40, host_pages=80)
    texts = [[n] * 9 for n in range(8)]
    for text in texts:
        driver.serve(text)
    driver.push_out(pages=40)
    requests = []
    for text in texts:
        requests.append(driver.begin(text))
        driver.cache.step()
    assert all(request.state is RequestState.LOADING for request in requests)
    driver.copies[Direction.LOAD].run(5)
    assert driver.cache.step() == [], "an earlier load has not ended"
    driver.settle()
    assert all(request.state is RequestState.RUNNING for request in requests)


def test_a_request_aborted_while_it_loads_leaves_nothing_behind():
    driver = make(held=True)
    driver.serve(TEXT)
    driver.push_out()
    request = driver.begin(TEXT)
    driver.cache.step()
    driver.cache.abort(request)
    driver.settle()
    assert driver.cache.flush() == 0
    assert driver.cache.pages.free == 8


def test_a_preempted_request_goes_on_where_it_was():
    driver = make(WINDOW, tail_every_pages=99)
    request = driver.begin_loaded(TEXT)
    driver.compute(request, TEXT, upto=16)
    driver.cache.preempt(request)
    driver.push_out()
    assert driver.cache.begin(request.chain).reuse.tokens == 16


# Sharing


def test_of_two_requests_computing_the_same_text_one_copy_stays():
    driver = make(device_pages=10)
    first, second = driver.begin(TEXT), driver.begin(TEXT, priority=1)  # too urgent to wait for the first
    driver.compute(first, TEXT)
    driver.compute(second, TEXT)
    assert first.table[:4] == second.table[:4] and first.table[4] != second.table[4]
    assert len(driver.cache.pages.owned_ids()) == 6
    driver.check_bytes(second, TEXT)


def test_who_comes_second_waits_for_the_pages_of_the_first_up_to_the_last_tail_that_helps():
    driver = make(WINDOW, device_pages=20, tail_every_pages=2)
    first = driver.begin(TEXT)
    assert driver.begin(TEXT) == Wait(WaitFor.COMPUTING, 4)
    assert driver.begin(TEXT[:14] + [9] * 4) == Wait(WaitFor.COMPUTING, 2), "the first keeps a tail at two"
    assert isinstance(driver.begin([9] * 18), Request), "nobody computes this"
    assert isinstance(driver.begin(TEXT, ("b",)), Request), "nor this, for another tenant"
    driver.compute(first, TEXT, upto=8)
    assert driver.begin(TEXT) == Wait(WaitFor.COMPUTING, 2)
    driver.compute(first, TEXT)
    assert driver.begin_loaded(TEXT).reuse.device_tokens == 16


def test_without_a_tail_that_helps_nobody_is_waited_for():
    driver = make(WINDOW, device_pages=20, tail_every_pages=4)
    driver.begin(TEXT)
    assert isinstance(driver.begin(TEXT[:14] + [9] * 4), Request)


@pytest.mark.parametrize("end", ["abort", "preempt", "finish"])
def test_who_waits_for_another_s_pages_goes_on_when_that_one_ends(end):
    driver = make(device_pages=20)
    first = driver.begin(TEXT)
    assert driver.begin(TEXT) == Wait(WaitFor.COMPUTING, 4)
    getattr(driver.cache, end)(first)
    assert isinstance(driver.begin(TEXT), Request)


def test_chunks_of_any_size_give_the_same_tree():
    keys = []
    for chunk in (1, 3, 4, 18):
        driver = make()
        request = driver.begin(TEXT)
        for upto in range(chunk, 19, chunk):
            driver.compute(request, TEXT, upto=upto)
        keys.append(list(driver.cache.tree.index))
    assert keys[0] == keys[1][:4] == keys[2] == keys[3]


# Capacity is an outcome


def test_a_full_device_makes_a_request_wait_without_a_trace():
    driver = make(device_pages=4)
    running = driver.begin(TEXT[:13])
    driver.cache.extend(running, 13)
    waiting = driver.begin([7] * 9)
    before = driver.cache.stats()
    assert driver.cache.extend(waiting, 9) == Wait(WaitFor.DEVICE_PAGES, 3)
    assert driver.cache.stats() == before
    driver.cache.abort(running)
    assert not isinstance(driver.cache.extend(waiting, 9), Wait)


def full_device(running, **settings):
    """Cold pages fill the device, and the host is full of others; `running` requests run."""
    driver = make(held=True, device_pages=12, host_pages=12, evict="lru", save="back", **settings)
    for n in range(20, 23):
        driver.serve([n] * 33)
    assert driver.cache.host_pages.free == 0
    driver.serve([9] * 45)
    assert driver.cache.pages.free == 1
    return driver, [driver.begin([n]) for n in range(running)]


def test_a_page_that_is_leaving_is_promised_to_one_request_only():
    driver, requests = full_device(5)
    cache = driver.cache
    assert cache.extend(requests[0], 4) != Wait(WaitFor.LEAVING, 1), "one page was free"
    for request in requests[1:]:
        for _ in range(2):  # who asks twice is promised one page, not two
            assert cache.extend(request, 4) == Wait(WaitFor.LEAVING, 1)
    assert cache.pages.leaving == 4
    driver.settle()
    for request in requests[1:]:
        assert not isinstance(cache.extend(request, 4), Wait)
    assert cache.pages.free == 0 and cache.pages.leaving == 0


def test_pages_that_another_request_waits_for_are_taken_only_at_need():
    driver, (large, small) = full_device(2)
    cache = driver.cache
    assert cache.extend(large, 12) == Wait(WaitFor.LEAVING, 2), "it needs three, and one is free"
    assert cache.extend(small, 4, early=True) == Wait(WaitFor.LEAVING, 3)
    assert cache.pages.leaving == 3, "three and one are needed, and one is free"
    assert not isinstance(cache.extend(small, 4), Wait), "it can not go on without"
    assert cache.extend(large, 12) == Wait(WaitFor.LEAVING, 3)
    driver.settle()
    assert not isinstance(cache.extend(large, 12), Wait)


def test_what_leaves_for_a_text_that_waits_is_given_to_one_that_runs():
    """Nothing more could leave. If the running text were refused, it would give way to the waiting one."""
    driver, [running] = full_device(1)
    cache = driver.cache
    assert cache.begin(cache.chain([7] * 44), room_for=44) == Wait(WaitFor.LEAVING, 10)
    assert cache.pages.leaving == 10
    assert cache.extend(running, 8) == Wait(WaitFor.LEAVING, 1)
    driver.settle()
    assert not isinstance(cache.extend(running, 8), Wait)


def test_what_a_running_text_takes_from_one_that_waits_is_freed_for_that_at_once():
    driver, [running] = full_device(1)
    cache, chain = driver.cache, driver.cache.chain([7] * 8)
    assert cache.begin(chain, room_for=8) == Wait(WaitFor.LEAVING, 1) and cache.pages.leaving == 1
    assert not isinstance(cache.extend(running, 4), Wait), "one was free, and it needs it now"
    assert cache.pages.leaving == 2
    driver.settle()
    assert isinstance(cache.begin(chain, room_for=8), Request)


def test_pages_that_are_being_saved_already_leave_one_by_one_as_they_are_needed():
    driver = make(held=True, device_pages=8)
    cache = driver.cache
    first = driver.begin_loaded([7] * 32)
    driver.compute(first, [7] * 32)
    cache.finish(first)
    cache.step()
    assert cache.pages.free == 0 and len(cache.tree.copies.saving) == 8, "their saves have not landed"
    other = cache.begin(cache.chain([8]))
    assert cache.extend(other, 1) == Wait(WaitFor.LEAVING, 1) and cache.pages.leaving == 1
    driver.settle()
    assert not isinstance(cache.extend(other, 1), Wait) and cache.pages.free == 0


def test_who_needs_more_than_can_leave_is_promised_nothing():
    driver, (first, second) = full_device(2)
    cache = driver.cache
    cache.extend(first, 9 * 4)
    driver.settle()
    assert not isinstance(cache.extend(first, 9 * 4), Wait)
    assert cache.extend(second, 4 * 4) == Wait(WaitFor.DEVICE_PAGES, 4)
    assert cache.extend(first, 10 * 4) == Wait(WaitFor.LEAVING, 1), "these three are still to be had"
    assert cache.pages.leaving == 3


def test_a_text_larger_than_the_device_is_told_so():
    driver = make(device_pages=4)
    assert driver.begin(TEXT) == Wait(WaitFor.LARGER_DEVICE, 1)
    request = driver.begin(TEXT[:16])
    assert driver.cache.extend(request, 18) == Wait(WaitFor.LARGER_DEVICE, 1)


# Looking


def test_statistics_are_told_without_a_walk_over_the_tree():
    driver = make(V4)
    driver.serve(TEXT)

    class Unwalked(dict):
        def _walk(self):
            raise AssertionError("somebody walks the tree")

        __iter__ = keys = values = items = _walk

    before = driver.cache.stats()
    copies = driver.cache.tree.copies
    index, copies.index = copies.index, Unwalked(copies.index)
    with pytest.raises(AssertionError, match="walks"):
        list(driver.cache.tree.items())
    assert driver.cache.stats().cached_bytes == before.cached_bytes != {}
    copies.index = index


def test_statistics_count_true_bytes_per_tier_and_stream():
    driver = make(V4)
    driver.serve(TEXT)
    stats = driver.cache.stats()
    tails = driver.cache.counters["tails_saved"]
    for stream in V4.streams:
        things = 4 if stream in V4.page_streams else tails
        assert stats.cached_bytes["host"][stream.name] == things * V4.bytes_of(stream)
        assert stats.moved_bytes["saved"][stream.name] == things * V4.bytes_of(stream)
    pages = 8 + 4 * V4.places_per_tail
    assert stats.pools["device pages"] == PoolStats(pages, free=pages - 4 - tails * V4.places_per_tail)
    assert stats.cached_items["host"] == {"pages": 4, "tails": tails}
    assert stats.tail_streams == [stream.name for stream in V4.tail_streams]
    assert stats.capacity_bytes["device"] == pages * V4.page_bytes
    assert stats.capacity_bytes["host"] == stats.pools["host pages"].capacity * V4.place_bytes
    assert stats.counters["tokens_asked"] == 18


def test_an_observer_hears_what_each_tier_holds():
    driver, held = make(device_pages=4), set()
    driver.cache.watch(lambda told: [(held.add if e.stored else held.remove)((e.tier, e.key)) for e in told])
    driver.serve(TEXT[:16])
    driver.serve([5] * 9)
    driver.cache.step()
    tree = driver.cache.tree
    real = {(Tier.DEVICE, k) for k, p in tree.index.items() if p.device is not None}
    real |= {(Tier.HOST, k) for k, p in tree.index.items() if p.on_host}
    assert held == real and len(tree.index) == 6


def test_a_failing_observer_stops_nothing(caplog):
    driver = make()

    def observer(event):
        raise RuntimeError("not ours")

    driver.cache.watch(observer)
    assert driver.serve(TEXT).tokens == 0 and driver.serve(TEXT).tokens == 16
    driver.cache.step()
    assert driver.cache.counters["observer_errors"] >= 1 and "the observer failed" in caplog.text


def test_an_observer_that_comes_late_hears_everything_and_may_leave_at_any_time():
    driver, heard = make(), []
    driver.serve(TEXT)

    def observer(told):
        heard.extend((event.tier, event.key) for event in told)
        driver.cache.watch(None)

    driver.cache.watch(observer)
    driver.cache.step()
    driver.serve([5] * 9)
    assert len(heard) == len(set(heard)) == 8


def test_a_worker_that_takes_no_work_fails_the_load_and_nothing_else():
    driver = make(held=True)
    driver.serve(TEXT)
    driver.push_out()
    request = driver.begin(TEXT)

    def refuse(*args):
        raise RuntimeError("cannot schedule new futures after shutdown")

    submit, driver.copies[Direction.LOAD].submit = driver.copies[Direction.LOAD].submit, refuse
    driver.cache.step()
    (loaded,) = driver.cache.step()
    assert loaded.request is request and "shutdown" in str(loaded.error)
    assert driver.cache.counters["requests_failed"] == 1
    driver.copies[Direction.LOAD].submit = submit
    assert driver.serve(TEXT).host_tokens == 16


def test_committing_more_than_there_is_room_for_is_an_assertion():
    driver = make()
    request = driver.begin(TEXT)
    driver.cache.extend(request, 8)
    with pytest.raises(AssertionError, match="I2"):
        driver.cache.commit(request, 12)
    driver.cache.check()


def test_a_flush_leaves_what_a_request_holds():
    driver = make()
    driver.serve(TEXT)
    request = driver.begin(TEXT[:10])
    assert driver.cache.flush() == 2
    driver.cache.finish(request)
    assert driver.cache.flush() == 0 and driver.cache.pages.free == 8


# Starting


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"spec": LONG, "staging_tails": 2}, ConfigError, "staging_tails = 2"),
        ({"spec": WINDOW, "device_pages": -2}, ConfigError, "device_pages = 2: a page and its tails take 3"),
        ({"host_pages": 0, "copier": "nobody"}, ConfigError, "copier = 'nobody'"),
        ({"spec": SPECS["recurrent"], "host_pages": 1}, ConfigError, "host_bytes = .* a tail takes 2"),
        ({"layout": "page_last"}, ConfigError, "layout = 'page_last'"),
        ({"host_pages": 10**12}, BudgetError, "are available"),
    ],
)
def test_what_can_not_work_is_refused_at_the_start(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_closing_twice_is_fine():
    driver = make()
    driver.serve(TEXT)
    driver.cache.close()
    driver.cache.close()
