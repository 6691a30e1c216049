"""From an incident to the next `Build`: stop, collect reports, decide the step, map the losses, build.

The only place that turns a quorum and a plan into commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic_ring.control import policy, quorum
from elastic_ring.control.messages import Build, Report, Stand, Vote
from elastic_ring.control.state import (
    Building,
    Change,
    Closing,
    Crew,
    Forming,
    Incident,
    Loss,
    able_to_form,
    node_of,
    seats_on,
    spares,
)
from elastic_ring.control.turn import Turn
from elastic_ring.mesh import Mesh

OF_ONE_DEVICE = ("poisoned device", "device error")
"""Losses that say nothing about the step: a chip failed under it."""


def open_incident(
    turn: Turn, crew: Crew, cause: str, losses: tuple[Loss, ...] = (), planned: tuple[str, ...] = ()
) -> Incident:
    """What interrupts a running crew."""
    return add_losses(Incident(cause, turn.now, crew, planned=planned), losses)


def add_losses(incident: Incident, losses: tuple[Loss, ...]) -> Incident:
    seats = incident.base.seats if incident.base else ()
    ranks = {worker: rank for rank, worker in enumerate(seats)} if losses else {}
    ranked = tuple(replace(loss, global_rank=ranks.get(loss.worker)) for loss in losses)
    return replace(incident, lost=incident.lost + ranked)


def begin_closing(turn: Turn, crew: Crew, incident: Incident, why: str) -> None:
    """Stop everyone who may hold state, under a new generation that collects its reports anew."""
    turn.set(generation=turn.state.generation + 1)
    live = turn.live(crew.everyone)
    turn.stop(live, "abort")
    turn.enter(Closing(crew, incident, turn.now + turn.options.report_s))
    turn.say(f"closing generation {crew.generation} as {turn.state.generation}, {len(live)} to report: {why}")


def learn_vote(turn: Turn, crew: Crew, vote: Vote | None) -> bool:
    """Remember a vote result that counts; True if it was news. See `quorum.decide` for which ones count."""
    if vote is None or (vote.step >= crew.step and vote.cast != crew.cast):
        return False
    known = turn.state.newest_vote
    if known is not None and known.step >= vote.step:
        return False
    turn.set(newest_vote=vote)
    turn.commit(vote.step + 1)
    return True


def try_close(turn: Turn) -> None:
    """Go on once every member has reported or is gone."""
    phase = turn.phase
    assert isinstance(phase, Closing)
    everyone = phase.crew.everyone
    live = turn.live(everyone)
    if turn.pending_deaths(everyone) or any(worker not in phase.reports for worker in live):
        return
    reports = {worker: phase.reports[worker] for worker in live}
    base = phase.incident.base or phase.crew
    rebuild(turn, phase.crew, phase.incident, reports, base.mesh.dp)


def rebuild(turn: Turn, crew: Crew, incident: Incident, reports: Mapping[str, Report], target_dp: int) -> None:
    """All reports are in and nothing trains: decide the step, place everyone, order the next generation."""
    state = turn.state
    decided = quorum.decide(reports, state.newest_vote, state.committed, crew.step, crew.cast)
    if decided.step > state.committed:
        turn.set(newest_vote=decided.newest_vote)
        turn.commit(decided.step)
    if decided.roll_forward is not None:
        incident = replace(incident, rolled_forward=decided.roll_forward.step)
    if not incident.counted:
        incident = replace(incident, counted=True)
        if _is_crash_loop(turn, incident, decided.step):
            return
    base = incident.base or crew
    situation = policy.Situation(
        mesh=base.mesh,
        seats=base.seats,
        holders=decided.holders,
        empty=tuple(worker for worker in reports if worker not in decided.holders),
        spares=spares(turn.state),
        node_of=node_of(turn.state),
        target_dp=target_dp,
        min_dp=turn.options.min_dp,
        draining=frozenset(w.worker for w in turn.state.workers.values() if w.draining),
        hints=_hints(base, crew),
        seats_on=seats_on(turn.state),
    )
    planned = policy.plan(situation)
    if isinstance(planned, policy.Unheld):
        _nobody_holds(turn, crew, incident, planned, decided.step)
    elif isinstance(planned, policy.Short):
        _wait(turn, incident, planned)
    else:
        order_build(turn, planned, incident, decided.step, decided.roll_forward, situation, fresh=False)


def _hints(base: Crew, crew: Crew) -> dict[str, int]:
    if crew is base or crew.mesh != base.mesh:
        return {}
    seated = set(base.seats)
    return {worker: rank for rank, worker in enumerate(crew.seats) if worker not in seated}


def _is_crash_loop(turn: Turn, incident: Incident, step: int) -> bool:
    """Counts recoveries, not deaths: a node that takes four members with it counts once."""
    died = [loss for loss in incident.lost if loss.global_rank is not None and loss.reason not in OF_ONE_DEVICE]
    if not died or incident.planned:
        return False
    crashes = turn.state.crashes.again(step)
    turn.set(crashes=crashes)
    if crashes.count < turn.options.crash_loop_limit:
        return False
    told = "; ".join(
        f"rank {loss.global_rank} ({loss.worker} on {loss.node}): {loss.reason} {loss.detail}".strip() for loss in died
    )
    if step < turn.options.total_steps:
        what, look = f"step {step}", f"the batch of step {step} and at the memory it needs"
    else:
        what, look = "writing the weights", "the memory of rank 0's node: it holds the whole model once"
    turn.end(
        "CrashLoop",
        f"{what} killed members {crashes.count} times, last: {told}. Look at {look}; once more would kill the next "
        "members too.",
        step=step,
        recoveries=crashes.count,
    )
    return True


def _nobody_holds(turn: Turn, crew: Crew, incident: Incident, unheld: policy.Unheld, step: int) -> None:
    if step == 0 and turn.state.committed == 0:
        turn.say("no step was ever committed: a fresh start")
        for worker in turn.live(crew.everyone):
            turn.send(Stand(turn.cause, worker, turn.state.term, turn.state.generation))
        turn.enter(Forming(turn.now))
        return
    # Its result was voted, and applying it raised on every holder: in the step itself, or in the build after it.
    if incident.raised_step in (step - 1, step) and not incident.lost:
        told = f"{turn.state.user_detail}\nraised in the apply of step {step - 1}, on every holder"
        turn.end("UserCodeFailed", told, step=step - 1)
        return
    rung = policy.next_rung(turn.options.rungs)
    assert rung is None, f"rung {rung} is offered, but nothing here climbs down to it yet"
    ranks = ", ".join(str(rank) for rank in unheld.cp_ranks)
    lost = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    turn.end(
        "ShardLost",
        f"cp_rank {ranks} has no verified holder left after step {turn.state.committed - 1} was committed, and this "
        f"run keeps neither copies nor checkpoints. Lost: {lost or 'nobody'}. Run it again with more rings (dp) on "
        f"more nodes, so that no single loss takes every holder of a shard.",
        cp_ranks=ranks,
        step=step,
    )


def _wait(turn: Turn, incident: Incident, short: policy.Short) -> None:
    phase = turn.phase
    assert isinstance(phase, Closing), "a boundary keeps all its members, so it cannot be short of them"
    reason = f"{short.num_missing} more worker(s) for {turn.options.min_dp} ring(s) of {turn.options.cp}"
    if short.num_crowded:
        reason += f", each with a GPU of its own: {short.num_crowded} are there whose nodes have none left"
    if phase.waiting != reason:
        turn.edit_phase(waiting=reason, incident=incident)
        turn.say(f"every shard is held; waiting for {reason}")


def order_build(
    turn: Turn, plan: policy.Plan, incident: Incident, step: int, roll_forward: Vote | None,
    situation: policy.Situation, fresh: bool,
) -> None:
    rounds = turn.state.rounds.again(step)
    turn.set(rounds=rounds)
    if rounds.count > turn.options.round_limit:
        turn.end("RunFailed", _why_no_commit(incident, rounds.count, step), step=step)
        return
    state = turn.state
    donors = tuple((heal.donor, newcomer) for heal in plan.heals for newcomer in heal.newcomers)
    crew = Crew(state.term, state.generation, plan.mesh, plan.seats, step, plan.leaving, donors)

    def order(worker: str) -> Build:  # thousands are made: `dataclasses.replace` looks at every field of each
        return Build(turn.cause, worker, state.term, state.generation, plan.mesh, plan.seats, step, roll_forward,
                     plan.heals, fresh)  # fmt: skip

    _free_gpus(turn, plan, situation)
    leaving_donors = {heal.donor for heal in plan.heals} & set(plan.leaving)
    for worker in (*plan.seats, *(worker for worker in plan.leaving if worker in leaving_donors)):
        turn.send(order(worker))
    base = incident.base
    draining = situation.draining
    newcomers = set(plan.newcomers)
    rerun = base is not None and not incident.planned and incident.rolled_forward is None
    turn.set(last_change=Change(
        term=state.term, generation=state.generation, mesh=plan.mesh, previous_mesh=base.mesh if base else None,
        seats=plan.seats, step=step, cause=incident.cause, action=plan.action, promise=plan.promise,
        reason=plan.reason, lost=incident.lost,
        drained=tuple(worker for worker in plan.leaving if worker in draining),
        newcomers=plan.newcomers,
        survivors=tuple(w for w in plan.seats if w not in newcomers) if base else (),
        rolled_forward=incident.rolled_forward,
        step_rerun=step if rerun and step < state.options.total_steps else None,
        planned=bool(incident.planned) and not incident.lost,
        noticed_at=incident.noticed_at, closed_at=turn.now,
    ))
    turn.enter(Building(crew, order(""), incident, turn.now + state.options.build_s))
    how = f"; roll forward step {roll_forward.step}" if roll_forward else ""
    turn.say(f"generation {state.generation} at step {step}: {plan.reason} ({plan.promise}){how}")


def _free_gpus(turn: Turn, plan: policy.Plan, situation: policy.Situation) -> None:
    """After a build that failed without a death: have the spares beside a newcomer let go of their GPUs once more.

    A `Stand` that never arrived, or that an older coordinator did not come to send, leaves a spare with a GPU that
    counts as free, and the newcomer would wait for it in every attempt.
    """
    if not turn.state.fruitless_builds:
        return
    seated = set(plan.seats)
    crowded = {situation.node_of[worker] for worker in plan.newcomers} & set(situation.seats_on)
    for worker in situation.spares:
        if worker not in seated and situation.node_of[worker] in crowded:
            turn.send(Stand(turn.cause, worker, turn.state.term, turn.state.generation))


def _why_no_commit(incident: Incident, num_builds: int, step: int) -> str:
    told = "; ".join(f"{loss.worker} on {loss.node}: {loss.reason} {loss.detail}".strip() for loss in incident.lost)
    return (
        f"the ring was built {num_builds} times at step {step} and no step was committed. The last cause: "
        f"{incident.cause}. Lost: {told or 'nobody; look at the links between the nodes'}"
    )


def try_form(turn: Turn) -> None:
    """A fresh start as soon as dp rings and the spares are warm, or time is up and there are rings enough."""
    phase, options = turn.phase, turn.options
    assert isinstance(phase, Forming)
    ready = spares(turn.state)
    dp = min(options.dp, len(able_to_form(turn.state)) // options.cp)
    if dp == options.dp and phase.full_since is None:
        turn.edit_phase(full_since=turn.now)
    elif dp < options.dp and phase.full_since is not None:
        turn.edit_phase(full_since=None)
    phase = turn.phase
    assert isinstance(phase, Forming)
    if phase.full_since is not None:
        starting = any(worker.life == "starting" for worker in turn.state.workers.values())
        complete = len(ready) >= options.dp * options.cp + options.spares or not starting
        if not complete and turn.now < phase.full_since + options.spare_grace_s:
            return
    elif dp < options.min_dp or turn.now < phase.since + options.start_s:
        return
    situation = policy.Situation(
        mesh=Mesh(dp, options.cp), seats=(), holders={}, empty=(), spares=ready,
        node_of=node_of(turn.state),
        target_dp=dp, min_dp=options.min_dp, fresh=True, seats_on=seats_on(turn.state),
    )
    plan = policy.plan(situation)
    assert isinstance(plan, policy.Plan), plan
    turn.set(generation=turn.state.generation + 1)
    cause = "start" if turn.state.last_change is None else "fresh start"
    order_build(turn, plan, Incident(cause, turn.now, None, counted=True), 0, None, situation, fresh=True)
