"""A spare takes a member's place although that member lives: a straggler, or a suspect of two rings that differ. Pure.

A second attempt at a step reveals a fault that comes once (`corruption`), but not a lasting one: both attempts look
alike. So a spare replaces one suspect, and the step runs again. If the ranks agree now, the suspect was wrong: its GPU
is bad, and the run avoids its node. If they still differ, the suspect becomes a spare, and the spare replaces the next
suspect. No rank applies the step until all agree.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ring.control.capacity import worker_pool
from elastic_ring.control.messages import MemberFailed, Release, Standby, StragglerFound
from elastic_ring.control.state import (
    Incident,
    Membership,
    Running,
    State,
    Suspects,
    Transition,
    able_to_form,
    expect,
    members,
)
from elastic_ring.mesh import Mesh


def can_replace(state: State, worker: str) -> bool:
    return len([name for name in able_to_form(state) if name != worker]) >= expect(state, Running).membership.mesh.size


def avoid_node(ctx: Transition, worker: str) -> None:
    """Hire on this worker's node, and take spares from it, only where no other node is left."""
    node = ctx.state.nodes.get(ctx.state.workers[worker].node)
    if node is not None and not node.avoided:
        ctx.put_node(replace(node, avoided=True))


def replace_straggler(ctx: Transition, event: StragglerFound) -> None:
    """A spare takes the member's place at the next boundary; without one nothing changes: slow beats fewer."""
    phase, slow = ctx.phase, f"{event.worker} is {event.ratio:.1f} times as slow as its peers"
    if not isinstance(phase, Running) or event.worker not in phase.membership.rank_of:
        ctx.explain(f"{event.worker} trains no more")
    elif ctx.state.workers[event.worker].draining or not can_replace(ctx.state, event.worker):
        ctx.explain(f"{slow}, and there is no spare for it")
    elif ctx.options.run.straggler != "act":
        ctx.explain(f"{slow}; straggler=log")
    else:
        avoid_node(ctx, event.worker)
        worker_pool.drain(ctx, [event.worker])
        ctx.explain(f"{slow}: a spare takes its place")


def narrow_suspects(
    ctx: Transition, membership: Membership, incident: Incident, event: MemberFailed
) -> Incident | None:
    """The incident for the next attempt at a step in which ranks differ and none can be named; None once that ends the
    run."""
    suspects = ctx.state.suspects
    _clear_suspect(ctx)
    if suspects is None or suspects.step != event.step:
        ctx.set(suspects=Suspects(event.step, event.suspects, event.detail))
        return incident
    ctx.set(suspects=replace(suspects, out=""))
    left = tuple(worker for worker in suspects.left if worker in membership.members and worker in ctx.state.workers)
    able = [worker for worker in left if can_replace(ctx.state, worker)]
    if not able:
        all_replaced = not left and suspects.out
        why = "each suspect was replaced in turn" if all_replaced else "there is no spare for a third opinion"
        ctx.end(
            "RunFailed",
            f"{event.detail}, in several attempts, and {why}. Nothing of the step was applied: go on from a "
            "checkpoint, on other machines, with a spare, or with three rings, which show who is wrong",
            step=event.step,
        )
        return None
    ctx.set(suspects=replace(suspects, left=tuple(worker for worker in left if worker != able[0]), out=""))
    ctx.explain(f"a spare takes the place of {able[0]}, to tell whether it computes wrongly")
    return replace(incident, replaces=able[0])


def note_replacement(ctx: Transition, incident: Incident, mesh: Mesh, placed: tuple[str, ...]) -> None:
    """After a build of these members was ordered. A changed mesh shows nothing."""
    suspects, base = ctx.state.suspects, incident.base
    if suspects is None:
        return
    is_out = bool(incident.replaces) and incident.replaces not in placed
    if is_out and base is not None and base.mesh == mesh:
        ctx.set(suspects=replace(suspects, out=incident.replaces, generation=ctx.state.generation))
    elif suspects.out in placed:
        ctx.set(suspects=replace(suspects, out=""))


def settle_suspects(ctx: Transition) -> None:
    """The suspect was wrong if the members commit the step without it."""
    phase, suspects = expect(ctx.state, Running), ctx.state.suspects
    if suspects is None or ctx.state.committed <= suspects.step:
        return
    wrong = suspects.out
    if wrong and ctx.ready_among([wrong]) and phase.membership.generation == suspects.generation:
        text = f"{suspects.why}; they agree without {wrong}, which was wrong: its processor or memory is faulty"
        avoid_node(ctx, wrong)
        worker = ctx.state.workers[wrong]
        ctx.put(replace(worker, status="stopping", deadline=ctx.now + ctx.options.timeouts.report_s, written_off=True))
        ctx.send(Release(ctx.cause, wrong, ctx.state.term, text))
        ctx.explain(text)
    else:
        _clear_suspect(ctx)
    ctx.set(suspects=None)


def _clear_suspect(ctx: Transition) -> None:
    """The replaced suspect was not wrong, or nothing can show it any more: it becomes a spare."""
    suspects = ctx.state.suspects
    if suspects is not None and suspects.out not in members(ctx.state) and ctx.ready_among([suspects.out]):
        ctx.send(Standby(ctx.cause, suspects.out, ctx.state.term, ctx.state.generation))
        ctx.explain(f"{suspects.out} was not wrong, and is a spare")
