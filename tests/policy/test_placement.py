"""Goal: tails stand where a text will be continued. Method: the drawing of the module, in numbers."""

from tiercel.policy.placement import Boundary, tail_boundaries


def boundaries(**options):
    defaults = {
        "resumed_pages": 0,
        "total_pages": 5,
        "turn_ends": (),
        "branch_page": 0,
        "every_pages": 100,
        "page_tokens": 256,
        "pages_per_window": 1,
    }
    return dict(sorted(tail_boundaries(**defaults | options).items()))


def test_a_message_end_gets_the_last_boundary_before_it():
    assert [*boundaries(turn_ends=[400, 1000])] == [1, 3, 5]


def test_a_message_end_on_a_boundary_gets_that_boundary():
    assert [*boundaries(turn_ends=[512])] == [2, 5]


def test_the_end_of_the_prompt_and_the_branch_point_get_one():
    assert [*boundaries(branch_page=4)] == [4, 5]


def test_a_long_text_gets_one_every_so_many_pages():
    assert [*boundaries(total_pages=9, every_pages=4)] == [4, 8, 9]


def test_what_was_resumed_needs_none():
    assert [*boundaries(resumed_pages=3, turn_ends=[0, 256, 768, 1024], branch_page=2)] == [4, 5]


def test_a_text_shorter_than_a_page_gets_none():
    assert [*boundaries(total_pages=0, turn_ends=[3])] == []


def test_a_window_of_three_pages_needs_the_two_tails_before_it():
    ends = {"turn_ends": [4 * 256], "total_pages": 9, "resumed_pages": 2}
    assert [*boundaries(**ends, pages_per_window=3)] == [3, 4, 7, 8, 9]


def test_each_tail_says_why_it_is_kept():
    options = {"total_pages": 20, "every_pages": 8, "turn_ends": [700, 1300], "branch_page": 5}
    assert boundaries(**options) == {
        2: Boundary.TURN,
        5: Boundary.BRANCH,
        8: Boundary.EVERY,
        16: Boundary.EVERY,
        20: Boundary.PROMPT,
    }
    assert boundaries(pages_per_window=2) == {4: Boundary.WINDOW, 5: Boundary.PROMPT}
