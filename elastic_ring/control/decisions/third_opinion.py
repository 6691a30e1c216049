"""Two rings differ twice: a spare shows which of them computes wrongly. Pure, no I/O.

The second attempt reveals a fault that comes once (`corruption`), but not a lasting one: both attempts look alike. So a
spare replaces one suspect, and the step runs again. If the ranks agree now, the suspect was wrong: its GPU is bad, and
the run avoids its node. If they still differ, the suspect becomes a spare, and the spare replaces the next suspect. No
rank applies the step until all agree.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.decisions import stragglers
from elastic_ring.control.messages import MemberFailed, Release, Standby
from elastic_ring.control.state import Incident, Membership, Running, Suspects
from elastic_ring.control.state import members as members_of
from elastic_ring.control.transition import Transition
from elastic_ring.mesh import Mesh


def differs(ctx: Transition, membership: Membership, incident: Incident, event: MemberFailed) -> Incident | None:
    """Ranks do not agree, and nobody is named: what the next attempt changes. None once that ends the run."""
    known = ctx.state.suspects
    if known is None or known.step != event.step:
        _let_go(ctx)
        ctx.set(suspects=Suspects(event.step, event.suspects, event.detail))
        return incident
    _let_go(ctx)
    ctx.set(suspects=replace(known, out=""))
    left = tuple(worker for worker in known.left if worker in membership.members and worker in ctx.state.workers)
    able = [worker for worker in left if stragglers.can_replace(ctx.state, worker)]
    if not able:
        why = "each suspect was replaced in turn" if not left and known.out else "there is no spare for a third opinion"
        ctx.end(
            "RunFailed",
            f"{event.detail}, in several attempts, and {why}. Nothing of the step was applied: go on from a "
            "checkpoint, on other machines, with a spare, or with three rings, which show who is wrong",
            step=event.step,
        )
        return None
    ctx.set(suspects=replace(known, left=tuple(worker for worker in left if worker != able[0]), out=""))
    ctx.explain(f"a spare takes the place of {able[0]}, to tell whether it computes wrongly")
    return replace(incident, replaces=able[0])


def replaced(ctx: Transition, incident: Incident, mesh: Mesh, members: tuple[str, ...]) -> None:
    """A build of these members was ordered. A changed mesh shows nothing."""
    known, base = ctx.state.suspects, incident.base
    if known is None:
        return
    is_out = bool(incident.replaces) and incident.replaces not in members
    if is_out and base is not None and base.mesh == mesh:
        ctx.set(suspects=replace(known, out=incident.replaces, generation=ctx.state.generation))
    elif known.out in members:
        ctx.set(suspects=replace(known, out=""))


def settle(ctx: Transition) -> None:
    """The suspect was wrong if the members commit the step without it."""
    phase, known = ctx.phase, ctx.state.suspects
    assert isinstance(phase, Running)
    if known is None or ctx.state.committed <= known.step:
        return
    if known.out and ctx.ready_among([known.out]) and phase.membership.generation == known.generation:
        told = f"{known.why}; they agree without {known.out}, which was wrong: its processor or memory is faulty"
        stragglers.avoid(ctx, known.out)
        worker = ctx.state.workers[known.out]
        ctx.put(replace(worker, status="stopping", deadline=ctx.now + ctx.options.timeouts.report_s, written_off=True))
        ctx.send(Release(ctx.cause, known.out, ctx.state.term, told))
        ctx.explain(told)
    else:
        _let_go(ctx)
    ctx.set(suspects=None)


def _let_go(ctx: Transition) -> None:
    """The suspect was not wrong, or nothing can show it any more: it becomes a spare."""
    known = ctx.state.suspects
    if known is not None and known.out not in members_of(ctx.state) and ctx.ready_among([known.out]):
        ctx.send(Standby(ctx.cause, known.out, ctx.state.term, ctx.state.generation))
        ctx.explain(f"{known.out} was not wrong, and is a spare")
