"""Follows a run: shows progress, serves callbacks, waits for a coordinator that is away, returns the result.

With the head of the Ray cluster its coordinator is away too; both come back where the head keeps the cluster's state
(docs/operating/start.md, "The head node"). No decision about training belongs here.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from elastic_ring import errors
from elastic_ring.config import RunConfig, environment
from elastic_ring.control.decisions.data_order import take_facts, version_at
from elastic_ring.control.decisions.terms import TermClaim
from elastic_ring.control.messages import BatchSkip, CorpusVersion
from elastic_ring.data.prepared import with_versions
from elastic_ring.data.sampling.order import SkippingOrder, by_batch
from elastic_ring.files import shown_url
from elastic_ring.monitor.callbacks import Callback, CallbackDelivery, RunInfo
from elastic_ring.monitor.progress import ProgressLine
from elastic_ring.monitor.result import Result
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.folds.recovery_log import LinesHeard
from elastic_ring.runtime.coordinator.inbox import End, News
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.access import ended_part, is_listening, own_parts
from elastic_ring.runtime.driver.ray_session import leaving
from elastic_ring.runtime.driver.session import interruptible, lease
from elastic_ring.runtime.driver.submission import Submission
from elastic_ring.runtime.driver.task_checks import training_order
from elastic_ring.runtime.ray_head import reconnect_s, warn_if_shorter
from elastic_ring.runtime.terms import Terms
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

FOLLOW_S = 0.4
FETCH_S = 5.0
ASK_S = 1.0  # between two questions to the head


class Follower:
    """One driver's view of a run, from its submission to its result."""

    def __init__(self, submission: Submission, callbacks: Sequence[Callback]) -> None:
        self._submission, self._run, self._callbacks = submission, submission.run, callbacks
        run = submission.run
        self._result = partial(Result, path=run.driver_folder, storage_uri=run.storage_uri if run.is_remote else "")
        self._fetched_s = 0.0

    def follow(self, fingerprint: str) -> Result:
        """Attach to the run or start it, follow it to its end, and remove its coordinator.

        Raises: a class of `elastic_ring.errors` when the run fails; KeyboardInterrupt once the run is cleared.
        """
        run = self._run
        with interruptible(run, self._submission.attempt) as followed:
            coordinator = self._submission.find_or_start(fingerprint)
            if coordinator is None:
                self._submission.fetch_records()
                result = self.finished()
                assert result is not None
                return result
            followed.append(coordinator)
            answer = attach.ask(coordinator, run)
            if answer is not None and answer.head_is_kept:
                warn_if_shorter("this driver", reconnect_s(environment()), run.timeouts.lease_s)
            with lease(coordinator, run.timeouts.lease_s / 6):
                end = self._follow(coordinator, "" if answer is None else answer.attempt)
        with leaving():
            if not attach.remove(coordinator, run):
                log.error("left behind: the coordinator of run %s, which was killed", run.name)
        return self.result(end)

    def finished(self) -> Result | None:
        """The result of an earlier submission that did all steps, once the callbacks have received its last events;
        None for a run that still has steps to do. Raises as `Submission.finished_summary`."""
        summary = self._submission.finished_summary()
        if summary is None:
            return None
        line = f"run {self._run.name} is finished already; its summary is in {self._run.driver_folder}"
        ProgressLine(sys.stderr, summary["steps"]).note(line)  # as the lines of a run that trains: no log hides it
        with self.delivery() as delivery:
            delivery.deliver()
        return self._result(summary)

    def delivery(self) -> CallbackDelivery:
        run, folder = self._run, self._run.driver_folder
        return CallbackDelivery(
            self._callbacks,
            RunInfo(run.name, folder, self._submission.settings_record()),
            bring=partial(run_storage.fetch_places, run, folder),
            keep=partial(run_storage.keep_places, run, folder),
        )

    def _follow(self, coordinator: Any, attempt: str) -> End:
        """Show progress until the run ends; returns how it ended. Each call to the coordinator renews the lease."""
        newest, heard, is_open = (0, -1), LinesHeard(), False
        link = CoordinatorLink(self._run, ray.get_runtime_context().gcs_address, attempt)
        with self.delivery() as delivery, ProgressLine(sys.stderr, self._submission.task.step.steps) as progress:
            while True:
                try:
                    news = link.ask(coordinator, newest, heard)
                except ActorDiedError as error:
                    end = attach.end_on_record(self._run, attempt)
                    if end is not None:  # another driver saw the end first and killed the coordinator
                        return end
                    link.raise_gone(error)
                if news is None:
                    continue
                if not is_open and (news["steps"] or news["ended"]):
                    progress.open(news["steps"][0].step if news["steps"] else 0)
                    is_open = True
                for line in news["lines"]:
                    progress.note(line)
                heard = news["heard"]
                for metrics in news["steps"] if self._run.progress else ():
                    progress.step(metrics)
                newest = max([newest, *((metrics.generation, metrics.step) for metrics in news["steps"])])
                if news.get("phase") != "starting":  # until then the folder may hold an earlier attempt's records
                    self._serve_callbacks(coordinator, delivery, news)
                if news["ended"] is not None:
                    return news["ended"]
                time.sleep(FOLLOW_S)

    def _serve_callbacks(self, coordinator: Any, delivery: CallbackDelivery, news: News) -> None:
        """Deliver events, and answer a run that waits for callbacks after a validation. A store's records are fetched
        now and then, while the run waits, and at its end. A run that gets no answer here asks again."""
        run, awaited_step = self._run, news.get("awaited")
        is_due = news["ended"] is not None or awaited_step is not None
        if run.is_remote and (is_due or (self._callbacks and time.monotonic() - self._fetched_s > FETCH_S)):
            self._fetched_s = time.monotonic()
            try:
                run_storage.fetch(run, run.driver_folder)
            except errors.StorageFailed as error:
                log.warning("the run's records cannot be fetched now, training goes on: %s", error)
        delivery.deliver()
        if awaited_step is None or (requests := delivery.requests(awaited_step)) is None:
            return
        try:
            if ray.get(coordinator.answer.remote(awaited_step, **requests), timeout=2 * run.timeouts.hello_s):
                delivery.grant(awaited_step, requests)
        except (GetTimeoutError, ActorUnavailableError, ActorDiedError):
            log.warning("the coordinator does not take what callbacks want; the driver tries again")

    def result(self, end: End) -> Result:
        """The result of a run that ended so. Raises the run's error."""
        for name in end.get("left_behind", []):
            log.error("left behind: %s", name)
        if end["error"]:
            kind = getattr(errors, end["error"], errors.RunFailed)
            task, message, facts = self._submission.task, end["message"], dict(end["facts"])
            if kind in (errors.CrashLoop, errors.UserCodeFailed) and int(facts["step"]) < task.step.steps:
                batch, samples = _batch_of(task, int(facts["step"]), *take_facts(facts))
                message += f"\nThe batch of that step {batch}"
                facts |= {} if samples is None else {"samples": samples}
            raise kind(message, **facts)
        if "summary" not in end:
            raise errors.RunFailed(f"the run ended before its last step: {end['message']}")
        return self._result(end["summary"])


def _batch_of(
    task: TrainingTask, step: int, versions: tuple[CorpusVersion, ...], skips: tuple[BatchSkip, ...]
) -> tuple[str, Sequence[int] | None]:
    """(which sequences the failed step has, in words; these sequences), by the manifest of its step."""
    try:
        order = training_order(replace(task, data=with_versions(task.data, by_batch(versions, skips))))
        sample_ids = SkippingOrder(order, skips).sample_ids(step)
    except (ValueError, errors.StorageFailed) as error:  # the crashes say more than a manifest that is gone
        return f"cannot be named: {error}", None
    version = version_at(versions, step)
    corpus = shown_url(str(task.data))
    if version is not None:
        corpus = f"{version.uri} (which holds from step {version.first_step} on)"
    return f"is sequences {', '.join(map(str, sample_ids))} of {corpus}", sample_ids


class CoordinatorLink:
    """A driver's questions to its coordinator; gives up once neither it nor the head has answered for `lease_s`."""

    def __init__(self, run: RunConfig, gcs_address: str, attempt: str = "") -> None:
        """`attempt`: the submission that this driver follows."""
        self._run, self._gcs_address, self._own = run, gcs_address, TermClaim(0, attempt)
        self._silent_since: float | None = None  # of the coordinator
        self._starting_since: float | None = None  # one process after the other may answer, and none begin
        self._head_silent_since: float | None = None
        self._looked_at = 0.0
        self._own_ray = own_parts()

    def ask(self, coordinator: Any, newest: tuple[int, int], heard: LinesHeard) -> News | None:
        """The coordinator's news after step `newest`, (generation, step), and these lines; None while it is away.

        Raises: CoordinatorLost after `lease_s` without an answer; ActorDiedError when it is gone for good.
        """
        error: BaseException | None = None
        try:
            generation, step = newest
            news = self._get(coordinator.follow.remote(step, heard, generation))
        except (GetTimeoutError, ActorUnavailableError) as failure:
            # Ray restarts a coordinator that was killed; one that froze may resume.
            news, error = None, failure
        head_answers, now = self._head_answers(), time.monotonic()
        if part := ended_part(self._own_ray):
            reason = f"the Ray that this command started has lost its {part}, and ends the run with it"
            coordinator.stop.remote(reason)
            time.sleep(self._run.timeouts.stop_save_s)
            self._give_up(reason, error)
        if news is not None:
            self._silent_since = None
            self._own = replace(self._own, term=news.get("term", self._own.term))
            self._refuse_starts(news, now)
            if head_answers and self._head_silent_since is not None:
                away_s = now - self._head_silent_since
                log.warning("run %s: the head and the coordinator answer again after %.0f s", self._run.name, away_s)
                self._head_silent_since = None
            return news
        lease_s = self._run.timeouts.lease_s
        self._silent_since = self._silent_since or now
        if now - self._silent_since > lease_s:
            silent = "coordinator" if self._head_silent_since is None else "head of the Ray cluster and no coordinator"
            self._give_up(f"no {silent} answered run {self._run.name} for {lease_s:.0f} s (timeouts.lease_s)", error)
        time.sleep(min(ASK_S, lease_s / 10))
        return None

    def _refuse_starts(self, news: News, now: float) -> None:
        is_starting = news.get("phase") == "starting" and news["ended"] is None
        self._starting_since = (self._starting_since or now) if is_starting else None
        limit_s = self._run.timeouts.lease_s + self._run.checkpoint_config.fail_after_s
        if self._starting_since is not None and now - self._starting_since > limit_s:
            limit = f"{limit_s:.0f} s (timeouts.lease_s and checkpoint.fail_after_s)"
            self._give_up(f"no coordinator of run {self._run.name} has begun for {limit}", None)

    def raise_gone(self, error: BaseException) -> Never:
        """Raises CoordinatorLost for a coordinator that does not come back."""
        # Ray's further lines name what may have killed a process: memory, a crash.
        reason = str(error).partition("\n")[0] or type(error).__name__
        self._give_up(f"the coordinator of run {self._run.name} is gone: {reason}", error)

    def _get(self, answer: Any) -> News | None:
        """Wait `hello_s` for an answer, but not for one that may never come: None when the head is away."""
        deadline = time.monotonic() + self._run.timeouts.hello_s
        while not ray.wait([answer], timeout=ASK_S)[0] and time.monotonic() < deadline:
            if ended_part(self._own_ray) or not self._head_answers():
                return None
        news: News = ray.get(answer, timeout=ASK_S)
        return news

    def _head_answers(self) -> bool:
        """Whether the head answered the last question; logs once when it does not."""
        now = time.monotonic()
        if now - self._looked_at < ASK_S:
            return self._head_silent_since is None
        self._looked_at = now
        answers = is_listening(self._gcs_address)
        if not answers and self._head_silent_since is None:
            self._head_silent_since = now
            log.warning(
                "run %s: the head of the Ray cluster at %s does not answer; the workers train on without it. This "
                "driver waits up to %.0f s (timeouts.lease_s); should it end without another word, Ray has ended it: "
                "submit the same command again",
                self._run.name,
                self._gcs_address,
                self._run.timeouts.lease_s,
            )
        return answers

    def _give_up(self, reason: str, error: BaseException | None) -> Never:
        """Raises CoordinatorLost, logged first: without a head Ray may end this process before anybody prints it.
        TermLost where another submission has the run: to submit again would take it back."""
        try:
            terms = Terms(self._run).open()
            if self._own.term or terms.has_claimed(self._own.attempt):
                terms.refuse_if_replaced(self._run, self._own)
        except errors.StaleMessage:
            pass  # this submission's own newest
        except errors.StorageFailed as failure:
            log.warning("could not find out whether another submission has taken the run: %s", failure)
        instead = "resumes from the newest checkpoint" if self._run.checkpoint_config.is_on else "begins anew"
        message = (
            f"{reason}. Submit the same command again: it attaches to the run if that is still alive, else it {instead}"
        )
        log.error("%s", message)
        raise errors.CoordinatorLost(message, lease_s=self._run.timeouts.lease_s) from error
