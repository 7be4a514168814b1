"""Goal: whose numbers they are is told by every one of three words. Method: pairs that must differ."""

from tiercel.spec.identity import Identity


def test_every_word_counts_and_none_runs_into_the_next():
    words = [
        ("a", "b", "c"),
        ("x", "b", "c"),
        ("a", "x", "c"),
        ("a", "b", "x"),
        ("ab", "", "c"),
        ("a", "bc", ""),
    ]
    assert len({Identity(*each).digest for each in words}) == len(words)
    assert Identity("a", "b", "c").digest == Identity("a", "b", "c").digest
    assert len(Identity("a").digest) == 32


def test_without_kernels_numbers_are_shared_with_kernels_bits():
    assert Identity("a", "b").share == "numbers"
    assert Identity("a", "b", "c").share == "bits"
