"""Goal: each rule of the tree in a scene of a few pages. Method: texts are words, a letter is a page
(`tests.make`)."""

import pytest

from tests.make import TreeDriver, make_keys
from tiercel.tree.candidates import SWEEP_AT_LEAST
from tiercel.tree.check import check, show
from tiercel.types import DevicePageId


def make_tree(**options):
    return TreeDriver(**options)


# Matching


def test_a_match_is_the_longest_common_prefix_of_any_text():
    tree = make_tree()
    for text in ("abcd", "abxy", "q"):
        tree.add(text)
    lengths = {text: tree.match(text).found for text in ("abcz", "abxyz", "ab", "z", "qq", "")}
    assert lengths == {"abcz": 3, "abxyz": 4, "ab": 2, "z": 0, "qq": 1, "": 0}


def test_a_match_looks_no_further_than_its_limit():
    tree = make_tree()
    tree.add("abcd")
    assert tree.tree.match(make_keys("abcd"), 3).found == 3


def test_a_match_tells_the_tiers_apart():
    tree = make_tree(host_pages=9)
    tree.add("abcd")
    tree.evict(2)
    match = tree.match("abcd")
    assert (match.found, match.device, match.boundary) == (4, 2, 4)
    assert tree.match("abcd", device_only=True).found == 2


def test_a_match_changes_nothing():
    tree = make_tree(host_pages=9)
    tree.add("abcd")
    before = show(tree.tree)
    tree.match("abzz")
    assert show(tree.tree) == before


def test_a_branch_point_is_where_a_text_leaves_the_others():
    tree = make_tree()
    tree.add("abcd")
    assert tree.match("abx").branch == 2
    assert tree.match("abcd").branch == 0, "the whole text is known"
    assert tree.match("abcde").branch == 0, "it only goes on where the other ended"
    assert tree.tree.match(make_keys("abcd"), 3).branch == 0, "a limit is not a branch"
    assert tree.match("xyz").branch == 0, "it shares nothing"


# Tails


def test_without_a_tail_nothing_can_be_resumed_and_with_one_up_to_it():
    tree = make_tree(pages_per_window=1)
    tree.add("abcdef")
    assert tree.match("abcdef").boundary == 0
    tree.add_tail("ab")
    tree.add_tail("abcd")
    match = tree.match("abcdef")
    assert (match.boundary, match.found) == (4, 6)
    assert [tail.page for tail in match.tails] == [tree.page("abcd")]
    assert tree.match("abc").boundary == 2, "an earlier tail, not zero"


def test_a_window_of_three_pages_needs_three_tails_in_a_row():
    tree = make_tree(pages_per_window=3)
    tree.add("abcdefgh")
    for text in ("ab", "abc", "abcde", "abcdef"):
        tree.add_tail(text)
    assert tree.match("abcdefgh").boundary == 0
    tree.add_tail("abcd")
    assert tree.match("abcdefgh").boundary == 6
    assert [t.page.depth for t in tree.match("abcdefgh").tails] == [6, 5, 4]
    assert tree.match("abcd").boundary == 4


def test_near_the_start_of_a_text_a_long_window_needs_only_what_there_is():
    tree = make_tree(pages_per_window=3)
    tree.add("abcd")
    tree.add_tail("a")
    tree.add_tail("ab")
    assert tree.match("abcd").boundary == 2


def test_a_device_only_match_wants_its_tails_on_the_device():
    tree = make_tree(pages_per_window=1)
    tree.add("abcd")
    tree.add_tail("ab")
    tree.add_tail("abcd")
    tree.tree.evict(1, tree.take_host)
    tree.finish_saves()
    assert tree.match("abcd").boundary == 4
    assert tree.match("abcd", device_only=True).boundary == 4, "the older tail went first"
    tree.tree.evict(1, tree.take_host)
    assert tree.match("abcd", device_only=True).boundary == 0


def test_a_path_keeps_at_most_so_many_tails_and_the_coldest_gives_way():
    tree = make_tree(pages_per_window=1, tails_per_path=2)
    tree.add("abcdef")
    tree.add_tail("a")
    tree.add_tail("ab")
    tree.find("a")
    tree.add_tail("abcd")
    tree.tree.cap_tails(tree.page("abcd"))
    assert [bool(tree.page("abcd"[:n]).tail) for n in (1, 2, 4)] == [True, False, True]
    assert len(tree.tree.copies.actions.device) == 1
    check(tree.tree)


@pytest.mark.parametrize("evict", ["lru", "lfu", "slru", "priority"])
@pytest.mark.parametrize("window", [1, 2])
def test_the_tail_of_a_prompt_that_others_share_gives_way_last(evict, window):
    tree = make_tree(pages_per_window=window, tails_per_path=2, evict=evict)
    tree.add("abxy")
    for end in range(3 - window, 3):
        tree.add_tail("ab"[:end])
    tree.add("abcdefgh")
    for end in range(4, 9):
        tree.add_tail("abcdefgh"[:end])
        tree.find("abcdefgh"[:end])
        tree.tree.cap_tails(tree.page("abcdefgh"[:end]))
    assert tree.match("abxy").boundary == 2 and tree.match("abcdefgh").boundary == 8
    assert sum(page.tail is not None for page in tree.tree.index.values()) == 2 * window
    check(tree.tree)


def test_a_locked_tail_does_not_give_way():
    tree = make_tree(pages_per_window=1, tails_per_path=1)
    tree.add("abc")
    tree.add_tail("a")
    tree.tree.lock(tree.page("a").tail)
    tree.add_tail("abc")
    tree.tree.cap_tails(tree.page("abc"))
    assert tree.page("a").tail is not None


@pytest.mark.parametrize("evict", ["lru", "lfu", "slru", "priority"])
def test_the_tails_a_resume_reads_never_give_way_to_each_other(evict):
    tree = make_tree(pages_per_window=3, tails_per_path=1, evict=evict)
    tree.add("abcdefgh")
    for end in (2, 3, 4):
        tree.add_tail("abcdefgh"[:end])
    tree.find("abcdefgh")
    for end in (6, 7, 8):
        tree.add_tail("abcdefgh"[:end])
    tree.tree.cap_tails(tree.page("abcdefgh"))
    assert tree.match("abcdefgh").boundary == 8 and tree.match("abcde").boundary == 0


def test_a_tail_leaves_the_device_before_its_page():
    tree = make_tree(pages_per_window=1)
    tree.add("ab")
    tree.add_tail("ab")
    places = list(tree.page("ab").tail.device)
    tree.tree.evict(1)
    assert tree.page("ab").tail is None and tree.on("device", "a", "ab") == ["a", "ab"]
    assert tree.tree.copies.actions.device == places
    check(tree.tree)


def test_a_tail_takes_its_places_with_it_and_one_eviction_may_be_enough():
    tree = make_tree(pages_per_window=1, tail_places=3)
    tree.add("ab")
    tree.add_tail("ab", places=3)
    assert tree.tree.evict(2) == 3, "a tail leaves whole"
    assert len(tree.tree.copies.actions.device) == 3 and tree.on("device", "a", "ab") == ["a", "ab"]
    assert tree.tree.evict(2) == 2


def test_a_page_takes_its_tail_with_it():
    tree = make_tree(pages_per_window=1)
    tree.add("ab")
    tree.add_tail("ab")
    tree.tree.copies.drop(tree.page("ab"))
    assert len(tree.tree.copies.actions.device) == 2
    check(tree.tree)


def test_a_page_stays_on_the_device_while_its_tail_arrives():
    driver = make_tree(pages_per_window=1, host_pages=1)
    tree = driver.tree
    driver.add("a")
    driver.add_tail("a")
    driver.evict()
    load = tree.load_start(driver.page("a").tail, (DevicePageId(next(driver.ids)),), batch=1)
    check(tree)
    assert driver.evict() == 0
    tree.load_done(load, ok=False)
    assert driver.evict() == 1
    check(tree)


# Inserting


def test_a_duplicate_is_given_back_and_the_first_copy_stays():
    tree = make_tree()
    tree.add("ab")
    keys, first = make_keys("abc"), tree.page("ab").device
    pages = tree.tree.insert(tree.tree.root, keys, [901, 902, 903])
    assert tree.tree.copies.actions.device == [901, 902]
    assert [page.device for page in pages][1:] == [first, 903]


def test_a_page_that_was_only_on_the_host_takes_the_fresh_copy():
    tree = make_tree(host_pages=9)
    tree.add("abc")
    tree.evict(2)
    freed = len(tree.tree.copies.actions.device)
    tree.add("abc")
    assert tree.on("device", "ab", "abc") == tree.on("host", "ab", "abc") == ["ab", "abc"]
    assert len(tree.tree.copies.actions.device) == freed
    check(tree.tree)


def test_a_fresh_copy_may_come_while_the_old_one_is_still_being_saved():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    old = tree.page("ab").device
    tree.evict(1, finish_saves=False)
    assert tree.on("device", "ab") == tree.on("host", "ab") == []
    tree.add("ab")
    tree.finish_saves()
    assert tree.on("device", "ab") == tree.on("host", "ab") == ["ab"]
    assert tree.tree.copies.actions.device == [old], "the old place is free only now"
    check(tree.tree)


def test_an_insert_stops_before_a_page_that_is_arriving():
    tree = make_tree(host_pages=9)
    tree.add("abc")
    tree.evict(2)
    tree.tree.load_start(tree.page("ab"), 77, batch=5)
    pages = tree.tree.insert(tree.page("a"), make_keys("abc")[1:], [901, 902])
    assert pages == [] and tree.tree.copies.actions.device.count(901) == 0
    check(tree.tree)


def test_growing_chunk_by_chunk_gives_the_same_tree():
    whole, parts = make_tree(), make_tree()
    whole.add("abcdef")
    for text in ("ab", "abcd", "abcdef"):
        parts.add(text)
    assert [p.key for p in whole.tree.index.values()] == [p.key for p in parts.tree.index.values()]


# Evicting


def test_the_least_recently_used_leaf_goes_first_and_then_its_parents():
    tree = make_tree()
    for text in ("abc", "xyz"):
        tree.add(text)
    tree.find("abc")
    tree.evict(4)
    assert tree.on("device", "x", "xy", "xyz", "a", "ab", "abc") == ["a", "ab"]


def test_a_parent_counts_as_used_when_its_child_was():
    tree = make_tree()
    tree.add("ab")
    tree.add("x")
    tree.find("ab")
    tree.evict(1)
    assert tree.on("device", "x", "ab") == ["ab"], "x is older than the use of ab"
    tree.add("y")
    tree.evict(1)
    tree.evict(1)
    assert tree.on("device", "a", "ab", "y") == ["y"], "a inherited the use of ab, and that is older than y"


def test_the_most_often_found_page_survives_under_lfu_through_its_children():
    tree = make_tree(evict="lfu")
    tree.add("ab")
    tree.add("xy")
    for _ in range(3):
        tree.find("ab")
    tree.find("xy")
    tree.find("xy")
    tree.evict(2)
    assert tree.on("device", "x", "xy", "a", "ab") == ["a", "ab"]
    tree.evict(1)
    assert tree.page("a").hits == 3


def test_a_page_found_twice_is_protected_under_slru():
    tree = make_tree(evict="slru")
    for text in ("a", "b"):
        tree.add(text)
    tree.find("a")
    tree.find("a")
    tree.find("b")
    tree.evict(1)
    assert tree.on("device", "a", "b") == ["a"]


def test_high_priority_survives_under_priority():
    tree = make_tree(evict="priority")
    tree.add("a", priority=5)
    tree.add("b")
    tree.find("b")
    tree.evict(1)
    assert tree.on("device", "a", "b") == ["a"]


def test_a_lock_on_the_deepest_page_protects_its_whole_path():
    tree = make_tree()
    tree.add("abc")
    tree.tree.lock(tree.page("abc"))
    assert tree.evict(9) == 0
    tree.tree.unlock(tree.page("abc"))
    assert tree.evict(9) == 3


def test_more_unlocks_than_locks_is_an_assertion():
    tree = make_tree()
    tree.add("a")
    with pytest.raises(AssertionError, match="I3"):
        tree.tree.unlock(tree.page("a"))


def test_a_page_with_a_host_copy_gives_its_place_back_at_once():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    tree.save("ab")
    device = tree.page("ab").device
    tree.evict(1, finish_saves=False)
    assert tree.tree.copies.actions.device == [device] and not tree.tree.copies.actions.saves
    assert tree.on("host", "a", "ab") == ["a", "ab"]


def test_a_page_without_one_gives_its_place_back_when_the_copy_ended():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    device = tree.page("ab").device
    tree.evict(1, finish_saves=False)
    assert tree.tree.copies.actions.device == [] and len(tree.tree.copies.actions.saves) == 1
    assert tree.match("ab").found == 2, "still in the tree, on its way"
    tree.finish_saves()
    assert tree.tree.copies.actions.device == [device] and tree.on("host", "ab") == ["ab"]


def test_a_whole_cold_path_can_leave_in_one_go():
    tree = make_tree(host_pages=9)
    tree.add("abcd")
    assert tree.evict(4, finish_saves=False) == 4
    assert len(tree.tree.copies.actions.saves) == 4
    tree.finish_saves()
    assert tree.match("abcd").found == 4 and tree.match("abcd").device == 0
    check(tree.tree)


def test_without_a_host_a_page_is_gone():
    tree = make_tree()
    tree.add("ab")
    tree.tree.evict(1)
    assert tree.match("ab").found == 1


def test_a_failed_save_of_a_page_that_left_loses_it_and_what_is_below_it():
    tree = make_tree(host_pages=9)
    tree.add("abcd")
    tree.evict(2)
    tree.evict(1, finish_saves=False)
    tree.finish_saves(ok=False)
    assert tree.match("abcd").found == 1
    check(tree.tree)
    assert tree.host_free + len(tree.tree.copies.actions.host) == 9


def test_a_failed_save_of_a_page_that_stayed_changes_nothing():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    tree.tree.save_start(tree.page("ab"), tree.take_host(1))
    tree.finish_saves(ok=False)
    assert tree.on("device", "ab") == ["ab"] and tree.on("host", "ab") == []
    check(tree.tree)


def test_what_could_not_be_saved_once_is_tried_again_when_it_leaves():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    tree.tree.save_start(tree.page("ab"), tree.take_host(1))
    tree.finish_saves(ok=False)
    tree.evict(1)
    assert tree.on("host", "ab") == ["ab"]


# The host


def test_a_full_host_gives_up_doubles_first():
    tree = make_tree(host_pages=3)
    tree.add("x")
    tree.evict(1)
    tree.add("ab")
    tree.save("ab")
    tree.add("q")
    tree.find("ab")
    tree.find("x")
    tree.evict(1)
    assert tree.on("host", "x", "q") == ["x", "q"], "x is the only copy; a copy of ab's pages had to go"
    assert len(tree.on("host", "a", "ab")) == 1 and tree.on("device", "a", "ab") == ["a", "ab"]
    check(tree.tree)


def test_without_doubles_the_coldest_page_of_the_host_goes():
    tree = make_tree(host_pages=2)
    for text in ("x", "y", "z"):
        tree.add(text)
    for _ in range(3):
        tree.evict(1)
    assert tree.on("host", "x", "y", "z") == ["y", "z"]
    assert tree.match("x").found == 0


def test_a_page_waits_rather_than_being_lost_while_colder_ones_are_still_on_their_way():
    tree = make_tree(host_pages=2)
    for text in ("x", "y", "z"):
        tree.add(text)
    assert tree.evict(3, finish_saves=False) == 2
    assert tree.on("device", "z") == ["z"]
    tree.finish_saves()
    assert tree.evict(1) == 1 and tree.on("host", "x", "y", "z") == ["y", "z"]
    check(tree.tree)


def test_a_page_does_not_wait_for_saves_that_bring_only_what_is_hotter():
    tree = make_tree(host_pages=1, evict="priority")
    tree.add("b", priority=1)
    tree.add("a", priority=5)
    tree.tree.save_start(tree.page("a"), tree.take_host(1))
    assert tree.evict(1, finish_saves=False) == 1
    assert tree.match("b").found == 0 and tree.on("device", "a") == ["a"]
    check(tree.tree)


def test_a_page_displaces_only_what_is_colder():
    tree = make_tree(host_pages=1, evict="priority")
    tree.add("a", priority=5)
    tree.evict(1)
    tree.add("b", priority=1)
    tree.evict(1)
    assert tree.on("host", "a", "b") == ["a"]


def test_the_host_evicts_leaves_only():
    tree = make_tree(host_pages=2)
    tree.add("ab")
    tree.evict(2)
    tree.add("x")
    tree.evict(1)
    assert tree.on("host", "a", "ab", "x") == ["a", "x"]


def test_pages_and_tails_share_the_host():
    tree = make_tree(host_pages=3, pages_per_window=1, tail_places=3)
    tree.add("ab")
    tree.add_tail("ab", places=3)
    tree.tree.evict(1, tree.take_host)
    tree.finish_saves()
    assert tree.host_free == 0 and tree.page("ab").tail.on_host
    tree.tree.lock(tree.page("ab"))
    tree.add("x")
    tree.evict(1)
    assert tree.on("host", "x") == ["x"], "the tail was colder than x and took three pages"
    assert tree.page("ab").tail is None
    check(tree.tree)


# Loading


def test_a_load_that_fails_leaves_the_host_copy_as_it_was():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    tree.evict(2)
    moves = [
        tree.tree.load_start(tree.page(text), n, batch=1) for n, text in enumerate(("a", "ab"), start=500)
    ]
    for move in reversed(moves):
        tree.tree.load_done(move, ok=False)
    assert tree.match("ab").device == 0 and tree.on("host", "a", "ab") == ["a", "ab"]
    assert set(tree.tree.copies.actions.device) >= {500, 501}
    check(tree.tree)


def test_what_is_being_loaded_can_not_leave_either_tier():
    tree = make_tree(host_pages=2)
    tree.add("ab")
    tree.evict(2)
    for n, text in enumerate(("a", "ab"), start=500):
        tree.tree.load_start(tree.page(text), n, batch=1)
    assert tree.evict(9) == 0 and not tree.tree.evict_host()


def test_for_what_others_read_on_the_host_the_oldest_copies_leave_and_the_latest_stays():
    """First what only the host has, the coldest first; then copies of what the device has, too."""
    tree = make_tree(host_pages=9)
    for text in "abcd":
        tree.add(text)
    tree.evict(2)
    for text in "cd":
        tree.tree.save_start(tree.page(text), tree.take_host(1))
    tree.finish_saves()
    left = []
    while tree.tree.evict_host_oldest():
        left.append("".join(tree.on("host", *"abcd")))
        check(tree.tree)
    assert left == ["bcd", "cd", "d", ""]
    assert tree.on("device", *"abcd") == ["c", "d"]


# Flushing and looking


def test_a_flush_forgets_what_nobody_holds():
    tree = make_tree(host_pages=9, pages_per_window=1)
    tree.add("abc")
    tree.add("abx")
    tree.add_tail("abc")
    tree.tree.lock(tree.page("abx"))
    assert tree.tree.flush() == 3
    assert tree.match("abc").found == 2
    tree.tree.unlock(tree.page("abx"))
    assert tree.tree.flush() == 0
    check(tree.tree)


def test_a_flush_with_transfers_pending_loses_no_place():
    tree = make_tree(host_pages=9)
    tree.add("ab")
    tree.evict(1, finish_saves=False)
    assert tree.tree.flush() == 2
    tree.finish_saves()
    assert tree.tree.flush() == 0
    assert (
        len(tree.tree.copies.actions.device) == 2 and tree.host_free + len(tree.tree.copies.actions.host) == 9
    )


def test_show_draws_one_line_per_page_and_tail():
    tree = make_tree(host_pages=9, pages_per_window=1)
    tree.add("ab")
    tree.add("ax")
    tree.add_tail("ab")
    lines = show(tree.tree).splitlines()
    assert len(lines) == 4 and lines[1].startswith("  ") and "tail" in lines[2] and " D ." in lines[0]


@pytest.mark.parametrize("fault", ["children", "device gap", "doubles", "line"])
def test_the_check_finds_seeded_faults(fault):
    tree = make_tree(host_pages=9)
    tree.add("abc")
    tree.save("abc")
    check(tree.tree)
    if fault == "children":
        tree.page("a").children += 1
    elif fault == "device gap":
        tree.page("ab").device = None
    elif fault == "doubles":
        tree.tree.doubles.pop()
    else:
        tree.tree.device.pop()
    with pytest.raises(AssertionError):
        check(tree.tree)


def test_what_is_gone_is_not_kept_alive_by_the_line_it_stood_in():
    tree = make_tree(pages_per_window=1)
    for n in range(500):
        tree.add(chr(n + 300))
        tree.add_tail(chr(n + 300))
        tree.tree.copies.drop(tree.page(chr(n + 300)))
    for line in (tree.tree.device, tree.tree.host):
        assert len(line) <= 1.25 * SWEEP_AT_LEAST


def test_being_used_without_end_does_not_lengthen_the_line():
    tree = make_tree()
    tree.add("ab")
    for _ in range(500):
        tree.find("ab")
        tree.tree.lock(tree.page("ab"))
        tree.tree.unlock(tree.page("ab"))
    assert len(tree.tree.device) <= 1


# Copies


def test_a_page_has_one_copy_in_each_pool_absent_arriving_or_readable():
    driver = TreeDriver(host_pages=3)
    driver.add("a")
    page = driver.page("a")
    assert page.on_device and page.host is None
    driver.tree.save_start(page, driver.take_host(1))
    assert page.host is not None and not page.on_host
    driver.finish_saves()
    assert page.on_device and page.on_host
    driver.evict()
    assert page.device is None and page.on_host
    driver.tree.load_start(page, DevicePageId(99), batch=1)
    assert page.device == 99 and not page.on_device and page.on_host


# What comes to the host from elsewhere


def test_pages_that_arrive_are_readable_when_they_are_there_and_gone_when_they_fail():
    driver = TreeDriver(host_pages=9)
    keys = make_keys("abcd")
    brought = [(key, driver.take_host(1), b"") for key in keys[:2]]
    first = driver.tree.insert_arriving(driver.tree.root, brought)
    below = driver.tree.insert_arriving(first[-1], [(key, driver.take_host(1), b"") for key in keys[2:]])
    assert driver.on("host", "ab", "abcd") == [] and not driver.tree.evict_host()
    for page in below:
        driver.tree.arrive_done(page, page.host, True)
    check(driver.tree)
    lost = [page.host for page in (*first, *below)]
    driver.tree.arrive_done(first[0], first[0].host, False)
    assert driver.tree.index == {} and first[1].host is not None, "somebody is still writing there"
    driver.tree.arrive_done(first[1], first[1].host, True)
    assert sorted(driver.tree.copies.actions.host) == sorted(host for hosts in lost for host in hosts)


def test_a_copy_that_arrives_for_a_page_on_the_device_does_not_touch_that():
    driver = TreeDriver(host_pages=9)
    driver.add("ab")
    (page,) = driver.tree.insert_arriving(driver.page("ab"), [(make_keys("a")[0], driver.take_host(1), b"")])
    driver.tree.arrive_done(page, page.host, False)
    assert page.host is None and driver.on("device", "a", "ab") == ["a", "ab"]
    check(driver.tree)
