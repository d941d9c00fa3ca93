"""The least time in which a graph of stages can run on one compute and one communication resource."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epmoe.moe.makespan import Task


def lower_bound(tasks: Sequence[Task]) -> float:
    """No schedule ends sooner: the longest chain, and for each resource all its tasks between the shortest way to
    one of them and the shortest way on from one."""
    head, tail = _heads(tasks), _tails(tasks)
    bound = max((h + task.time + t for h, task, t in zip(head, tasks, tail)), default=0.0)
    for resource in {task.resource for task in tasks}:
        mine = [n for n, task in enumerate(tasks) if task.resource == resource]
        total = sum(tasks[n].time for n in mine)
        bound = max(bound, min(head[n] for n in mine) + total + min(tail[n] for n in mine))
    return bound


def best_makespan(tasks: Sequence[Task], most: int = 2_000) -> tuple[float, bool]:
    """The least makespan over all orders, and whether that is certain.

    Branch and bound: a schedule is built by choosing which of the ready tasks that could start before any of the
    others ends goes next (Giffler and Thompson 1960), the one that starts first, and of equals the one with the
    longest way to go, being tried first.  After ``most`` choices the search ends, and the best found so far is
    returned if it equals the lower bound, else the lower bound and False.
    """
    tails = _tails(tasks)
    bound = lower_bound(tasks)
    search = _Search(tasks, tails, most)
    search.run(_Partial({}, {}, frozenset(range(len(tasks)))))
    if search.left > 0 or search.best <= bound * (1 + 1e-12):
        return search.best, True
    return bound, False


@dataclass(frozen=True)
class _Partial:
    """A schedule under construction: end of each task done, when each resource is free, what is left."""

    end: dict[int, float]
    free: dict[str, float]
    left: frozenset[int]


@dataclass
class _Search:
    tasks: Sequence[Task]
    tails: list[float]
    left: int
    best: float = float("inf")

    def run(self, schedule: _Partial) -> None:
        """Depth first with a stack of its own: schedules may be longer than Python's recursion."""
        stack = [schedule]
        while stack and self.left > 0:
            schedule = stack.pop()
            if not schedule.left:
                self.best = min(self.best, max(schedule.end.values(), default=0.0))
            elif self._bound(schedule) < self.best:
                self.left -= 1
                stack += reversed(self._choices(schedule))

    def _start(self, schedule: _Partial, number: int) -> float:
        task = self.tasks[number]
        return max([schedule.free.get(task.resource, 0.0), *(schedule.end[k] for k in task.after)])

    def _choices(self, schedule: _Partial) -> list[_Partial]:
        ready = [n for n in schedule.left if all(k in schedule.end for k in self.tasks[n].after)]
        start = {n: self._start(schedule, n) for n in ready}
        first = min(ready, key=lambda n: (start[n] + self.tasks[n].time, n))
        resource, limit = self.tasks[first].resource, start[first] + self.tasks[first].time
        rivals = [n for n in ready if self.tasks[n].resource == resource and (start[n] < limit or n == first)]
        rivals.sort(key=lambda n: (start[n], -self.tails[n] - self.tasks[n].time, n))
        choices = []
        for n in rivals:
            end = start[n] + self.tasks[n].time
            choices.append(_Partial({**schedule.end, n: end}, {**schedule.free, resource: end}, schedule.left - {n}))
        return choices

    def _bound(self, schedule: _Partial) -> float:
        """No completion of the schedule ends sooner."""
        bound = max(schedule.end.values(), default=0.0)
        work: dict[str, float] = {}
        tail: dict[str, float] = {}
        for n in schedule.left:
            task = self.tasks[n]
            work[task.resource] = work.get(task.resource, 0.0) + task.time
            tail[task.resource] = min(tail.get(task.resource, float("inf")), self.tails[n])
            if all(k in schedule.end for k in task.after):
                bound = max(bound, self._start(schedule, n) + task.time + self.tails[n])
        for resource in work:
            bound = max(bound, schedule.free.get(resource, 0.0) + work[resource] + tail[resource])
        return bound


def _heads(tasks: Sequence[Task]) -> list[float]:
    head: list[float] = []
    for task in tasks:
        head.append(max((head[k] + tasks[k].time for k in task.after), default=0.0))
    return head


def _tails(tasks: Sequence[Task]) -> list[float]:
    tail = [0.0] * len(tasks)
    for number in reversed(range(len(tasks))):
        for k in tasks[number].after:
            tail[k] = max(tail[k], tail[number] + tasks[number].time)
    return tail
