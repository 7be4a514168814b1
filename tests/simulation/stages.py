"""A scheduler above a group of stages: each copies its own layers, says so late and in any order, and all of
them may die."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from tests.simulation.copies import FaultyCopier, HeldCopies
from tests.simulation.schedule import OrderedCopies, ScheduleWorld, SlowRunner
from tiercel.cache.memories import Memories, make_memories
from tiercel.config import CacheConfig
from tiercel.engine.step import Drawn, Step
from tiercel.engine.task import Outcome
from tiercel.errors import RunnerLost
from tiercel.memory.buffers import Memory
from tiercel.spec.stream import Stream
from tiercel.transfer.controller import LocalController, Ticket
from tiercel.transfer.copier import ReferenceCopier
from tiercel.transfer.plan import Direction, Plan
from tiercel.transfer.remote import Ack, RankWorker, RemoteController
from tiercel.types import Kind

DEATH = "the simulation killed a stage"


class Layers:
    """Some layers of a memory, as a copier sees it."""

    def __init__(self, memory: Memory, layers: Collection[int]) -> None:
        self._memory, self._layers, self.spec = memory, layers, self

    def streams_of(self, kind: Kind) -> list[Stream]:
        own = [
            (stream, tuple(n for n in stream.layers if n in self._layers))
            for stream in self._memory.spec.streams_of(kind)
        ]
        return [replace(stream, layers=layers) for stream, layers in own if layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


class Member:
    """One stage: its copies, and what it has to say about them."""

    def __init__(self, number: int, world: StagedScheduleWorld, layers: Collection[int]) -> None:
        device, host = world.cache.device, world.cache.host
        assert device is not None and host is not None
        own: Any = Layers(device, layers)
        self.copies = {Direction.LOAD: OrderedCopies(world.stream), Direction.SAVE: HeldCopies()}
        self.controller = LocalController(ReferenceCopier(own, host), self.copies)
        self.copier = FaultyCopier(self.controller._copier)
        self.controller._copier = self.copier  # type: ignore[assignment]
        self.worker = RankWorker(number, self.controller)
        self.said: list[Ack] = []
        """Acks on their way."""

    def wait_for(self, number: int) -> bool:
        """Copy until the load with this number is there. Returns whether it failed."""
        own = next((own for own, theirs in self.worker._theirs.items() if theirs == number), None)
        if own is None:
            return any(ack.number == number and ack.error for ack in self.said)
        held, ended = self.copies[Direction.LOAD], self.controller.tickets._ended
        while own not in ended:
            held.run(0)
        return ended[own].error is not None


class Landing:
    """A load that a step waits for, in all stages."""

    def __init__(self, world: StagedScheduleWorld, number: int) -> None:
        self._world, self._number = world, number

    def wait(self, layer: int) -> None:
        for member in self._world.members:
            failed = member.wait_for(self._number)
            self._world.model.load_failed = self._world.model.load_failed or failed


class StagesController(RemoteController):
    """Every plan goes to all members."""

    def __init__(self, world: StagedScheduleWorld, stages: int, *, in_order: bool) -> None:
        super().__init__(stages, in_order=in_order)
        self._world = world

    def submit(self, plan: Plan, *, layered: bool = False) -> Ticket:
        ticket = super().submit(plan, layered=layered)
        self.take()
        if not self._world.members:
            self.fail(DEATH)
        for member in () if self._world.dead else self._world.members:
            member.worker.start(ticket)
        return ticket


class MortalRunner(SlowRunner):
    """Runs no step when the group is dead."""

    world: StagedScheduleWorld

    def run(self, step: Step) -> Drawn:
        if self.world.dead:
            raise RunnerLost(DEATH, computing=self.world.was_computing)
        drawn = super().run(step)
        if step.loads:
            self.world.acknowledge(1.0)  # a member says that a load has ended before it says so of the step
        return drawn

    def restart(self) -> None:
        self._rings.clear()


class StagedScheduleWorld(ScheduleWorld):
    """A group of two or three stages."""

    LOOPS = ("plain", "queued")
    ACTIONS = (*ScheduleWorld.ACTIONS, ("die", 1))

    def __init__(self, setup: int) -> None:
        self.members: list[Member] = []
        self.dead = self.was_computing = False
        self.deaths = 0
        self.stages = Random(setup).choice([2, 3])
        super().__init__(setup)
        self._make_runner()
        self._bear()

    def _memories(self, config: CacheConfig) -> Memories:
        controller = StagesController(self, self.stages, in_order=self.random.random() < 0.5)
        return make_memories(self.spec, config, controller=controller)

    def _make_runner(self) -> None:
        old = self.runner
        controller = self.cache.flights.controller
        ready = partial(Landing, self) if controller else None
        self.runner = MortalRunner(self.model, ready, old._drafter, staging=old._staging)  # type: ignore[arg-type]
        self.runner.world = self

    def _bear(self) -> None:
        if self.cache.host is None:
            return
        layers, count = self.spec.layers, self.stages
        cuts = [layers[len(layers) * i // count : len(layers) * (i + 1) // count] for i in range(count)]
        self.members = [Member(number, self, own) for number, own in enumerate(cuts)]

    def _do_die(self, random: Random) -> None:
        self.faults += 1
        self.dead, self.was_computing = True, random.random() < 0.7

    def _do_fault(self, random: Random) -> None:
        self.copier = random.choice(self.members).copier if self.members else None
        super()._do_fault(random)

    def _land(self, share: float) -> None:
        """Copies of the members are carried out, and some of their acks arrive."""
        super()._land(share)
        if self.dead:
            return
        for member in self.random.sample(self.members, len(self.members)):
            for copies in member.copies.values():
                for _ in range(round(share * len(copies.held) + 0.5)):
                    if copies.held:
                        copies.run(self.random.randrange(len(copies.held)))
        self.acknowledge(max(share, 0.3))

    def acknowledge(self, share: float) -> None:
        """About this share of the acks arrive, in any order of the members."""
        controller = self.cache.flights.controller
        for member in self.random.sample(self.members, len(self.members)):
            member.said += member.worker.acks()
            while member.said and self.random.random() < share:
                controller.acknowledge(member.said.pop(0))  # type: ignore[union-attr]

    def lost(self, error: RunnerLost) -> list[Outcome]:
        """As `Engine.lost`: the processes are gone with their memory, and start again."""
        self.deaths, self.members = self.deaths + 1, []
        controller = self.cache.flights.controller
        if controller is not None:
            controller.fail(DEATH)  # type: ignore[attr-defined]
        self.stream.forget()
        for place in range(self.cache.pages.capacity):
            self.model.bytes.poison_place(place)
        outcomes = self.scheduler.lost(error)
        self.model.forget()
        self.runner.restart()
        self._bear()
        self.dead = False
        return outcomes
