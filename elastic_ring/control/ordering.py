"""Orders the next `Build` and records it as a change. Pure; what is built was decided before."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_ring.control.decisions import corpus, rollback, third_opinion
from elastic_ring.control.messages import Build, Checkpoint, SnapshotId, Standby, Vote
from elastic_ring.control.placement import copies, policy
from elastic_ring.control.state import Building, Change, Incident, Membership, State, end_step
from elastic_ring.control.transition import Transition


@dataclass(frozen=True)
class Beginning:
    """The state from which a mesh begins at `step`; the fields as in `Build`."""

    step: int
    roll_forward: Vote | None = None
    fresh: bool = False
    restore: Checkpoint | None = None
    step_back: SnapshotId | None = None
    keep: SnapshotId | None = None

    @property
    def goes_back(self) -> bool:
        """Whether live state is given up for an earlier one."""
        return self.restore is not None or self.step_back is not None

    @property
    def source(self) -> str:
        return "checkpoint" if self.restore is not None else "copy" if self.step_back is not None else "replica"


def order_build(
    ctx: Transition, plan: policy.Plan, incident: Incident, beginning: Beginning, situation: policy.Situation
) -> None:
    step = beginning.step
    rounds = ctx.state.rounds.again(step)
    ctx.set(rounds=rounds)
    if rounds.count > ctx.options.round_limit:
        ctx.end("RunFailed", _why_no_commit(ctx.state, incident, rounds.count, step), step=step)
        return
    corpus.begin(ctx, step)
    if incident.back is not None and beginning.goes_back:
        rollback.leave_out(ctx, incident.back, step)
        incident = replace(incident, back=None)
    state = ctx.state
    donors = tuple((sender, newcomer) for heal in plan.heals for newcomer in heal.newcomers for sender in heal.senders)
    membership = Membership(state.term, state.generation, plan.mesh, plan.members, step, plan.leaving, donors)
    holders = copies.CopyPlacement()
    nodes = tuple(situation.node_of[worker] for worker in plan.members)
    if mode := ctx.options.copy_mode(plan.mesh):
        holders = copies.place(plan.mesh, copies.failure_places(nodes, situation.domains_of, mode), mode)

    reliefs = ctx.options.memory_reliefs[: state.memory.num_reliefs]

    def order(worker: str) -> Build:  # thousands are made: `dataclasses.replace` looks at every field of each
        return Build(
            ctx.cause,
            worker,
            state.term,
            state.generation,
            plan.mesh,
            plan.members,
            step,
            beginning.roll_forward,
            plan.heals,
            beginning.fresh,
            beginning.restore,
            beginning.step_back,
            beginning.keep,
            holders.copy_holders,
            holders.parity_groups,
            reliefs,
            state.corpus,
            state.skips,
            bool(incident.saves_for) and not beginning.goes_back,
            nodes,
        )

    _free_gpus(ctx, plan, situation)
    leaving_senders = {sender for heal in plan.heals for sender in heal.senders} & set(plan.leaving)
    for worker in (*plan.members, *(worker for worker in plan.leaving if worker in leaving_senders)):
        ctx.send(order(worker))
    if beginning.goes_back:
        incident = replace(incident, undone=incident.undone + max(0, state.committed - step))
        ctx.set(committed=step, newest_vote=None, given_up=SnapshotId(step, membership.id))
    ctx.set(last_change=_change(ctx, plan, incident, beginning, situation))
    third_opinion.replaced(ctx, incident, plan.mesh, plan.members)
    # What the user's code raised before this build says nothing about what follows it.
    incident = replace(incident, raised_step=None)
    limit_s = state.options.building_s(restores=beginning.restore is not None)
    ask_again_at = ctx.now + state.options.timeouts.build_s / 2
    ctx.enter(Building(membership, order(""), incident, ctx.now + limit_s, ask_again_at))
    how = f"; roll forward step {beginning.roll_forward.step}" if beginning.roll_forward else ""
    how += f"; back to the copies of step {step}" if beginning.step_back is not None else ""
    ctx.explain(f"generation {state.generation} at step {step}: {plan.reason} ({plan.promise}){how}")


def _change(
    ctx: Transition, plan: policy.Plan, incident: Incident, beginning: Beginning, situation: policy.Situation
) -> Change:
    state, base, step = ctx.state, incident.base, beginning.step
    rolled = incident.rolled_forward
    rerun = base is not None and not incident.planned and rolled is None and step < end_step(state)
    newcomers = set(plan.newcomers)
    stayed = set(base.members) if base is not None and beginning.fresh else set(plan.members) - newcomers
    return Change(
        term=state.term,
        generation=state.generation,
        mesh=plan.mesh,
        previous_mesh=base.mesh if base else None,
        members=plan.members,
        step=step,
        cause=incident.cause,
        action=plan.action,
        promise=plan.promise,
        reason=plan.reason,
        lost=incident.lost,
        drained=tuple(worker for worker in plan.leaving if worker in situation.draining),
        newcomers=plan.newcomers,
        survivors=tuple(w for w in plan.members if w in stayed) if base else (),
        rolled_forward=rolled if beginning.step_back is None else None,
        step_rerun=step if rerun else None,
        planned=bool(incident.planned) and not incident.lost,
        noticed_at=incident.noticed_at,
        restored=beginning.restore,
        steps_undone=incident.undone,
        source=beginning.source,
    )


def _free_gpus(ctx: Transition, plan: policy.Plan, situation: policy.Situation) -> None:
    """After a failed build without a death, send `Standby` again to the spares on the newcomers' nodes.

    If a `Standby` was lost, or an older coordinator stopped before it sent it, a spare still uses a GPU that counts as
    free, and the newcomer would wait for that GPU in every attempt.
    """
    if not ctx.state.fruitless_builds:
        return
    placed = set(plan.members)
    crowded = {situation.node_of[worker] for worker in plan.newcomers} & set(situation.gpus_on)
    for worker in situation.spares:
        if worker not in placed and situation.node_of[worker] in crowded:
            ctx.send(Standby(ctx.cause, worker, ctx.state.term, ctx.state.generation))


def _why_no_commit(state: State, incident: Incident, num_builds: int, step: int) -> str:
    told = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    first = state.first_cause
    is_known = first.step == step and bool(first.text)
    nobody = "nobody" if is_known and not first.is_symptom else "nobody; look at the links between the nodes"
    return (
        f"the ring was built {num_builds} times at step {step} and no step was committed. "
        f"{f'The first cause: {first.text}. ' if is_known else ''}The last cause: {incident.cause}. "
        f"Lost: {told or nobody}"
    )
