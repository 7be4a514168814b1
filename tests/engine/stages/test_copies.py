"""Goal: in a stage's process a load begins behind the steps that came before it, a step behind the plans that
came before it, and the end of a load is told before the step that waited for it. Method: the thread of the
copies with a real controller, whose copies run when the test says so."""

import threading
from queue import Empty, SimpleQueue

import pytest

from tests.memory.specs import V4
from tests.simulation.copies import HeldCopies
from tests.transfer.rig import Rig
from tests.wait import until
from tiercel.engine.stage import Came, Copies
from tiercel.engine.stage_messages import StepOrder
from tiercel.engine.step import Step
from tiercel.transfer.controller import Ticket, make_controller
from tiercel.transfer.plan import Direction, Plan
from tiercel.transfer.remote import RankWorker

LOAD, SAVE = Direction.LOAD, Direction.SAVE


class Stage:
    def __init__(self):
        self.rig = Rig(V4, "page_first_direct")
        self.held = {direction: HeldCopies() for direction in Direction}
        controller = make_controller("reference", self.rig.device, self.rig.host, self.held)
        self.steps, self.told = SimpleQueue(), SimpleQueue()
        self.copies = Copies(RankWorker(0, controller), self.steps, self.told.put)
        threading.Thread(target=self.copies.run, daemon=True).start()

    def plan(self, number, direction):
        plan = Plan.of(direction, [((page,), (host,)) for page, host in self.rig.pages])
        self.copies.put(Ticket(number, plan, False))

    def step(self, number, *loads):
        self.copies.put(Came(StepOrder.of(number, Step(loads=loads)), 0.0))

    def next_step(self):
        return self.steps.get(timeout=10).order

    def begun(self, direction):
        return len(self.held[direction].held)


@pytest.fixture
def stage():
    return Stage()


def nothing_comes(queue):
    with pytest.raises(Empty):
        queue.get(timeout=0.1)


def test_a_load_waits_for_the_steps_before_it_and_a_save_does_not(stage):
    stage.step(1)
    stage.step(2)
    stage.plan(0, SAVE)
    until(lambda: stage.begun(SAVE), "the save has begun")
    stage.plan(1, LOAD)
    stage.step(3, 1)
    first, second = stage.next_step(), stage.next_step()
    stage.copies.step_ended(first)
    nothing_comes(stage.steps)
    assert not stage.begun(LOAD), "a step before it is under way"
    stage.copies.step_ended(second)
    assert stage.next_step().number == 3
    assert stage.begun(LOAD), "a step that waits for a load finds it begun"


def test_the_end_of_a_load_is_told_before_the_step_that_waited_for_it(stage):
    stage.plan(0, LOAD)
    stage.step(1, 0)
    order, ended = stage.next_step(), threading.Event()

    def run():
        stage.copies.step_ended(order)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert not ended.wait(0.1), "nobody has been told of its load"
    stage.held[LOAD].run(0)
    assert stage.told.get(timeout=10).number == 0
    assert ended.wait(10)


def test_steps_alone_do_not_pass_through_the_thread(stage):
    for number in range(3):
        stage.step(number)
        assert stage.steps.get_nowait().order.number == number
