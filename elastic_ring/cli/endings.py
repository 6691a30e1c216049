"""Every way in which `elastic-ring train` ends: its exit status, how its last line begins, and what to do then."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ring.errors import CoordinatorLost, ElasticRingError, TermLost
from elastic_ring.runtime.driver import stops


@dataclass(frozen=True)
class Ending:
    """`begins`: the last line, behind `elastic-ring train: ` except after a complete run; capital letters stand for
    others. `kind`: of the error that ends the command so; None if no error does."""

    how: str
    status: int
    begins: str
    then: str
    kind: type[BaseException] | None = None


STOPPED, RESUMES = 130, "the same command resumes"
COMPLETE = Ending("all steps are done, now or before", 0, "weights ", "")
ENDINGS = (
    COMPLETE,
    Ending("setting refused", 2, "SETTING=VALUE: ", "as the line says", ValueError),
    Ending("lost to another submission", 3, "run RUN in FOLDER is not this submission's any more: ", "", TermLost),
    Ending("head or coordinator lost", 1, "CoordinatorLost: ", RESUMES, CoordinatorLost),
    Ending("other failure", 1, "CLASS: ", "as the error's row says", ElasticRingError),
    Ending("Ctrl-C", STOPPED, f"{stops.STOPPED}; ", RESUMES, KeyboardInterrupt),
    Ending("SIGTERM, SIGHUP, SIGUSR1", STOPPED, f"{stops.SAVED} N; ", RESUMES, KeyboardInterrupt),
    Ending("these, no time to save", STOPPED, f"{stops.UNSAVED} ", "raise `stop_save_s`", KeyboardInterrupt),
    Ending("any before training", STOPPED, stops.EARLY, "", KeyboardInterrupt),
    Ending("a second one", STOPPED, f"{stops.AT_ONCE}; ", "wait until it is cleared", KeyboardInterrupt),
    Ending("any, without a head", STOPPED, stops.HEAD_IS_GONE, "start Ray; " + RESUMES, KeyboardInterrupt),
    Ending("any while Ray is left", STOPPED, stops.LEFT, "nothing: the run is over", KeyboardInterrupt),
    Ending("SIGKILL", 137, "", "submit again within `lease_s`: it attaches"),
)
"""The first whose `kind` an error is."""


def status_of(error: BaseException) -> int:
    statuses = (ending.status for ending in ENDINGS if ending.kind is not None and isinstance(error, ending.kind))
    return next(statuses, 1)  # of an error that no run ends with, such as a cluster that is not there
