"""The graph of a layer's stages, and how long it takes in a given order on one compute and one communication resource.

A resource runs one stage at a time and does not interrupt it.  Pure functions of the graph and the stages' times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPUTE, LINK = "compute", "link"


@dataclass(frozen=True)
class Task:
    """A stage: the resource it takes, for how long (any unit), and the earlier tasks (by number) it needs."""

    name: str
    resource: str
    time: float
    after: tuple[int, ...] = ()


# A layer: stage -> (resource, the stages it needs; "start" is the layer before).
LAYER = {
    "attention": (COMPUTE, ("start",)),
    "router": (COMPUTE, ("attention",)),
    "dispatch": (LINK, ("router",)),
    "shared": (COMPUTE, ("attention",)),
    "experts": (COMPUTE, ("dispatch",)),
    "combine": (LINK, ("experts",)),
    "sum": (COMPUTE, ("combine", "shared")),
}


def layer_tasks(lanes: Sequence[Mapping[str, float]], layers: int) -> list[Task]:
    """The graph of ``lanes`` through ``layers`` layers, from each lane's time per stage; a stage of no time is left
    out."""
    tasks: list[Task] = []
    for lane, times in enumerate(lanes):
        last: tuple[int, ...] = ()
        for layer in range(layers):
            done = {"start": last}
            for stage, (resource, needs) in LAYER.items():
                after = tuple(sorted({task for need in needs for task in done[need]}))
                if times.get(stage, 0) > 0:
                    done[stage] = (len(tasks),)
                    tasks.append(Task(f"{lane}.{layer}.{stage}", resource, times[stage], after))
                else:
                    done[stage] = after
            last = done["sum"]
    return tasks


def makespan(tasks: Sequence[Task], order: Sequence[int]) -> float:
    """The end of ``tasks`` when each resource takes its own in ``order``, as soon as what they need is done."""
    free: dict[str, float] = {}
    end: dict[int, float] = {}
    for number in order:
        task = tasks[number]
        start = max([free.get(task.resource, 0.0), *(end[k] for k in task.after)])
        free[task.resource] = end[number] = start + task.time
    return max(end.values(), default=0.0)
