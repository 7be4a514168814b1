"""The servers of these tests share the process that tries grammars, one for each vocabulary."""

from functools import cache

import pytest

from tiercel.server.calls import trials
from tiercel.server.calls.trials import TrialProcess
from tiercel.text.grammar import Vocabulary
from tiercel.text.trial import Pieces, pieces_of


@cache
def _process(eos: frozenset[int], pieces: tuple[bytes, ...], control: frozenset[int]) -> TrialProcess:
    return TrialProcess(Pieces(pieces, eos, control))


@pytest.fixture(autouse=True)
def one_trial_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(text: Vocabulary) -> TrialProcess:
        pieces = pieces_of(text)
        return _process(pieces.eos, tuple(pieces.pieces), pieces.control)

    monkeypatch.setattr(trials, "TrialProcess", shared)
