"""Train a decoder on real text over elastic rings: the main job, from a laptop to a cluster.

    elastic-ring train --preset laptop
    ray job submit --working-dir . -- python jobs/train_1t.py --preset laptop --run-name demo

Exits 0 when the run is complete (also when it was complete before), 1 when it failed, 2 for a wrong setting.
torch and Ray are imported once the settings are known to be right: help and refusals come at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from elastic_ring.cli import refused
from elastic_ring.cli.data_settings import data_flag, data_source, prepared_data, validation_sets
from elastic_ring.cli.endings import COMPLETE
from elastic_ring.cli.schedule import with_rates
from elastic_ring.cli.settings import DataConfig, TrainSettings, parse
from elastic_ring.config import check_copies, check_lasting, check_loss_spikes, check_together
from elastic_ring.errors import ElasticRingError, StorageFailed
from elastic_ring.files import check_model_links, shown_url
from elastic_ring.model.config import ModelConfig, active_parameters, num_parameters
from elastic_ring.monitor.goodput import seen_of
from elastic_ring.monitor.json_files import readable_json
from elastic_ring.monitor.metrics import CONFIG_NAME, METRICS_NAME, SUMMARY_NAME, SummaryFile
from elastic_ring.monitor.report import forecast_line, goodput_line
from elastic_ring.validation import from_plain

if TYPE_CHECKING:
    from torch import nn

    from elastic_ring.attention.patterns.layers import LayerPatterns
    from elastic_ring.config import RunConfig, StepConfig
    from elastic_ring.data.sampling.validation import ValidationSet
    from elastic_ring.forecast.sizing.memory import ModelPlan
    from elastic_ring.monitor.callbacks import Callback
    from elastic_ring.state.checkpoints.stored_weights import RunWeights
    from elastic_ring.train.task import Initial
    from elastic_ring.trainer import ElasticRingTrainer

    BuiltModel: TypeAlias = tuple[Callable[[], nn.Module], ModelConfig, Initial | None]
    """Factory, sizes and first values of a model."""

__all__ = ["build", "main", "parse"]

AUTO = "auto"


def build(settings: TrainSettings, built: BuiltModel | None = None) -> ElasticRingTrainer:
    """The trainer that the settings describe; `built`: its model, where there is one already. Raises ValueError for
    settings that cannot work."""
    from elastic_ring.trainer import ElasticRingTrainer

    step, scaling = settings.step, settings.scaling
    factory, model, initial = built or _model(settings)
    if not settings.plan:  # a plan prints the sizes itself
        line = f"{num_parameters(model):,} parameters"
        if model.num_experts:
            line += f", {active_parameters(model):,} of them for a token"
        line = line if settings.model_folder is None else str(settings.model_folder)  # whose model logs its own
        logging.info("%s, mesh %s, %d spare(s)", line, scaling.mesh, scaling.spares)
    weights = None
    if settings.from_run is not None:
        weights = initial = _weights_of(settings.from_run, settings.run, factory)
    settings = with_rates(settings, weights)
    trainer = ElasticRingTrainer(
        factory,
        data_source(settings.data, model, step),
        scaling_config=scaling,
        run_config=settings.run,
        step_config=step,
        optim_config=settings.optim,
        initial=initial,
        pattern=_pattern(settings.pattern, model, step),
        cost_model=settings.machine,
        validation=_validation(settings, model),
        callbacks=_callbacks(settings),
    )
    trainer.config_files["config.toml"] = settings.toml()
    return trainer


def _validation(settings: TrainSettings, model: ModelConfig) -> dict[str, ValidationSet]:
    """The sets to validate on, by name. Raises ValueError for data that does not suit the model."""
    from elastic_ring.data.sampling.validation import ValidationSet

    sets = {}
    for entry in validation_sets(settings.validate) if settings.validate is not None else ():
        source = None
        if entry.data:
            corpus = from_plain(DataConfig, data_flag(entry.data, {"source": ""}), f"validate.{entry.name}.")
            if corpus.source == "prepared":
                corpus, _ = prepared_data(corpus, model, vocabulary_is_chosen=True)
            source = data_source(corpus, model, settings.step)
        sets[entry.name] = ValidationSet(source, entry.weight, entry.sequences)
    return sets


def _callbacks(settings: TrainSettings) -> list[Callback]:
    """`--stop-early` and `--keep-best` as callbacks. Raises ValueError for a best checkpoint where none are taken."""
    if settings.keep_best is not None and not settings.run.checkpoint_config.is_on:
        raise ValueError(f"keep_best={settings.keep_best!r}: no checkpoints are taken; set checkpoint.every_steps")
    from elastic_ring.integrations.trackers import EarlyStopping, KeepBest

    stops = []
    if settings.stop_early is not None:
        metric, _, patience = settings.stop_early.rpartition(":")
        if not patience.isdigit():
            raise ValueError(f"stop_early={settings.stop_early!r}: give a count of validations, or METRIC:COUNT")
        stops.append(EarlyStopping(metric or "val_loss", int(patience)))
    return [*stops, *([] if settings.keep_best is None else [KeepBest(settings.keep_best)])]


def plan(settings: TrainSettings, trainer: ElasticRingTrainer | None = None) -> ModelPlan:
    """The plan of a rank; without `trainer` for settings that are `planned_alone`."""
    from elastic_ring.forecast.sizing.memory import plan_of

    sizes = settings.model if trainer is None else sizes_of(trainer, settings)
    pattern = None if trainer is None else trainer.task.pattern
    density, latent = 1.0, 0
    if trainer is not None and settings.step.linears == "native":
        latent = getattr(trainer.task.model, "latent", 0)
    if pattern is not None:
        if any(rule.awaits_content for group in pattern.groups for rule in group.rules):
            latent = 0  # keys cross, by which content chooses
        from elastic_ring.train.task import density_of

        density = density_of(pattern, sizes, settings.step)
    return plan_of(
        sizes,
        settings.scaling,
        settings.step,
        settings.run.copies,
        saves=settings.run.checkpoint_config.is_on,
        fused_norms=settings.model_folder is None or settings.scaling.device == "cuda",
        built_in=settings.model_folder is None,
        num_own=None if trainer is None else getattr(trainer.task.model, "num_parameters", None),
        density=density,
        latent=latent,
        optimizer=settings.optim.optimizer,
    )


def _with_choice(settings: TrainSettings) -> TrainSettings:
    """The settings of a preset's plan with the sequences of a pass as a run on this host's GPUs would choose them."""
    from elastic_ring.forecast.pass_choice import choose_pass
    from elastic_ring.model.config import ModelSizes

    sizes, step, record = ModelSizes(settings.model, is_built_in=True), settings.step, {}
    if settings.run.resume != "never":
        record = readable_json(settings.run.driver_folder / CONFIG_NAME) or {}
    if record and step.sequences_per_pass == AUTO:
        step = dataclasses.replace(step, sequences_per_pass=record.get("step", {}).get("sequences_per_pass", 1))
    choice = choose_pass(sizes, settings.scaling, step, settings.run, _gpu_of_host())
    logging.info("%s", choice.reason)
    step, scaling = choice.settings(step, settings.scaling)
    return dataclasses.replace(settings, step=step, scaling=scaling)


def _gpu_of_host() -> str | None:
    """The type of this host's first GPU, as its driver says, without CUDA; None without one of a forecast's types."""
    from elastic_ring.gpus import gpu_type

    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        return gpu_type(path.read_text(encoding="utf-8", errors="replace"))
    return None


def planned_alone(settings: TrainSettings) -> bool:
    """Whether a plan follows from the sizes alone. Checks of kernels, patterns, layouts by price and model folders
    import torch, which takes seconds."""
    return settings.model_folder is None and not _is_checked_by_torch(settings)


def _is_checked_by_torch(settings: TrainSettings) -> bool:
    return (
        bool(settings.pattern or settings.search or settings.machine or settings.step.kernel)
        or settings.step.layout == AUTO
    )


def _planned(settings: TrainSettings, trainer: ElasticRingTrainer) -> dict[str, float]:
    """The forecast of the run on its GPUs or this host's cores; of models without known sizes at most the memory."""
    from elastic_ring.cli.forecasts.seen import planned

    if settings.lora is not None:
        return {}
    settings = dataclasses.replace(settings, step=trainer.task.step, scaling=trainer.scaling_config)
    on_gpus = settings.scaling.device == "cuda"
    memory = {"gpu_bytes": float(plan(settings, trainer).gpu_bytes)} if on_gpus else {}
    try:
        return memory | planned(settings, trainer.gpu, os.cpu_count() or 1, os.getloadavg()[0])
    except (ValueError, StorageFailed):  # no forecast, and the run trains all the same
        return memory


def _check(settings: TrainSettings) -> None:
    """Raises ValueError for settings that the trainer would refuse, but for those whose check needs torch."""
    check_together(settings.scaling, settings.step, settings.run.faults)
    check_copies(settings.scaling.mesh, settings.run.copies)
    check_loss_spikes(settings.run, settings.optim)
    if settings.model_folder is not None:
        return
    if settings.step.experts != "auto" and not settings.model.num_experts:
        raise ValueError(f"step.experts={settings.step.experts!r}: the model has no experts; leave it out")
    if settings.data.source != "stdlib":
        data_source(settings.data, settings.model, settings.step)


def sizes_of(trainer: ElasticRingTrainer, settings: TrainSettings) -> ModelConfig:
    """The sizes of the model that the settings describe."""
    if settings.model_folder is None:
        return settings.model
    sizes: ModelConfig = trainer.task.model.sizes()  # type: ignore[attr-defined]
    return sizes


def _model(settings: TrainSettings) -> BuiltModel:
    """The preset's decoder, or the model folder's, which has first values of its own."""
    if settings.model_folder is not None:
        from elastic_ring.integrations.transformers import ring_model

        factory = ring_model(
            settings.model_folder,
            checkpoint_activations=settings.model.checkpoint_activations,
            loss_chunk_tokens=settings.model.loss_chunk_tokens,
            windows=settings.windows or "exact",  # type: ignore[arg-type]
            lora=settings.lora,
        )
        logging.info("%s: %s", settings.model_folder, factory.description())
        if 0 < (most := factory.most_positions) < settings.step.context_tokens:
            line = "%s: context_tokens=%d is more than its max_position_embeddings, %d, which it has not seen"
            logging.warning(line, settings.model_folder, settings.step.context_tokens, most)
        return factory, factory.sizes(), None
    from elastic_ring.model.init import Initialiser
    from elastic_ring.model.transformer import Transformer

    return (
        partial(Transformer, settings.model),
        settings.model,
        Initialiser(settings.step.seed, settings.model.num_layers),
    )


def _weights_of(source: str, run: RunConfig, factory: Callable[[], nn.Module]) -> RunWeights:
    """The weights of `source`, or those that `run` began with if its record names the same source, which may have saved
    again since, or be gone."""
    import torch

    from elastic_ring.state.checkpoints.stored_weights import RunWeights

    where = os.path.expanduser(source).removeprefix("file://")
    if (weights := _weights_on_record(where, run)) is not None:
        return weights
    with torch.device("meta"):
        shapes = {name: tuple(param.shape) for name, param in factory().named_parameters()}
    weights = RunWeights.open(where)
    weights.check(shapes)
    logging.info("begins with the weights of %s%s", shown_url(weights.uri), weights.folder and f", {weights.folder}")
    return weights


def _weights_on_record(where: str, run: RunConfig) -> RunWeights | None:
    """The weights that `run` began with by its record; None without a record. Raises ValueError if the run still needs
    them and they are gone."""
    from elastic_ring.runtime import run_storage
    from elastic_ring.state.checkpoints.checkpoint import committed
    from elastic_ring.state.checkpoints.stored_weights import RunWeights
    from elastic_ring.state.checkpoints.weight_files import are_there
    from elastic_ring.state.storage.folder import Storage

    if run.resume == "never":
        return None
    run_storage.fetch(run, run.driver_folder)
    weights = RunWeights.of_record(where, (readable_json(run.driver_folder / CONFIG_NAME) or {}).get("from"))
    own = Storage(run.storage_uri, timeout_s=run.timeouts.storage_s)
    if weights is not None and not (committed(own) or are_there(own)):
        weights.check_unchanged()
    return weights


def _pattern(text: str | None, model: ModelConfig, step: StepConfig) -> LayerPatterns | None:
    if text is None:
        return None
    from elastic_ring.attention.patterns.parse import read_pattern
    from elastic_ring.train.task import density_of

    try:
        pattern = read_pattern(text)
        pattern.check(model.num_layers, model.num_heads, model.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"--pattern: {error}") from error
    density, most = density_of(pattern, model, step), "at most " if pattern.density_is_bound else ""
    logging.info("attention: %s; density %s%.3f of a document as long as the context", pattern, most, density)
    return pattern


def main(argv: Sequence[str] | None = None) -> int:
    from elastic_ring.runtime.driver.stops import EARLY

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return _plan_or_train(parse(sys.argv[1:] if argv is None else argv))
    except (ValueError, ElasticRingError, KeyboardInterrupt) as error:
        return refused("elastic-ring train", error, EARLY)


def _plan_or_train(settings: TrainSettings) -> int:
    if settings.plan and planned_alone(settings):
        _check(settings)
        _list_text(settings)
        print("\n".join(plan(_with_choice(settings)).lines()))
        return 0
    if settings.plan and settings.lora is not None:
        raise ValueError(f"lora={settings.lora!r}: what adapters need is not planned; leave --plan or --lora out")
    if not settings.plan and _begins_at_once(settings):
        return _train_beside_ray(settings)
    trainer = build(settings)
    if settings.plan:
        from elastic_ring.train.startup.check import check_pattern
        from elastic_ring.train.startup.layouts import Layouts

        layouts = Layouts(trainer.task)
        layouts.choice(settings.scaling.cp, settings.scaling.device)  # logs what "auto" chooses
        if settings.scaling.device == "cuda":
            check_pattern(trainer.task, settings.scaling.cp, layouts)
        trainer.choose_pass(_gpu_of_host())
        settings = dataclasses.replace(settings, step=trainer.task.step, scaling=trainer.scaling_config)
        print("\n".join(plan(settings, trainer).lines()))
        return 0
    return _train(settings, trainer)


def main_plan(argv: Sequence[str] | None = None) -> int:
    """`elastic-ring plan`: what `elastic-ring train --plan` prints for the same settings; a laptop can plan 1 T."""
    return main(["--plan", *(sys.argv[1:] if argv is None else argv)])


def _begins_at_once(settings: TrainSettings) -> bool:
    """Whether Ray may start while torch and transformers are imported: all that is left to check is a folder's model.
    Raises ValueError for wrong settings."""
    if _is_checked_by_torch(settings) or (settings.run.driver_folder / SUMMARY_NAME).exists():
        return False
    if settings.model_folder is not None:
        check_model_links(Path(settings.model_folder).expanduser())
        try:
            config = readable_json(Path(settings.model_folder) / "config.json")
        except OSError:  # reading the model raises it again
            return False
        if "model_type" not in config:  # refused at once
            return False
    from elastic_ring.runtime.run_storage import check_writable

    _check(settings)
    check_lasting(settings.run.driver_folder)
    check_writable(settings.run.driver_folder, holds_run=not settings.run.is_remote)
    if not settings.run.is_remote:  # a finished run's data may be gone
        _list_text(settings)
    return True


def _list_text(settings: TrainSettings) -> None:
    """Raises ValueError for text that is not there."""
    if settings.data.source == "text":
        from elastic_ring.data.listing import list_source

        for entry in settings.data.paths:
            list_source(
                entry, allow_left_out=settings.data.allow_left_out, flag="--data", allow="--data.allow-left-out"
            )


def _train_beside_ray(settings: TrainSettings) -> int:
    """Train, with Ray starting while a thread imports torch and builds the model."""
    building: Future[BuiltModel] = Future()

    def build_model() -> None:  # imports no Ray
        try:
            built = _model(settings)
            importlib.import_module("torch._dynamo")  # by a first model on the meta device
            building.set_result(built)
        except BaseException as error:
            building.set_exception(error)

    threading.Thread(target=build_model, name="model", daemon=True).start()
    from elastic_ring.runtime.driver import access
    from elastic_ring.runtime.driver.ray_session import ray_session

    if access.find(starts=True):  # nothing to start: a wrong model is refused before a cluster is asked
        building.result()
    with ray_session(settings.scaling, settings.run.timeouts.lease_s):
        return _train(settings, build(settings, building.result()))


def _train(settings: TrainSettings, trainer: ElasticRingTrainer) -> int:
    from elastic_ring.cli.forecasts.seen import forecast_on_record, lines_of_end
    from elastic_ring.monitor.metrics_log import StepTable
    from elastic_ring.tuning.report import Prediction, training_terms

    trainer.forecast = partial(_planned, settings, trainer)
    predicted = None if settings.search is None else Prediction.read(Path(settings.search), trainer.task.pattern)
    result = trainer.fit()
    summary = result.summary
    with StepTable.load(result.path / METRICS_NAME) as table:
        seen, newest = seen_of(table.rows.values("step_s"), summary), table.newest(1)
    planned = forecast_on_record(result.path)
    if line := forecast_line(int(planned.get("gpu_bytes", 0)), int(seen.get("gpu_bytes", 0))):
        print(f"GPU memory: {line}")
    for line in lines_of_end(settings, planned, seen):
        print(line)
    if predicted is not None and "step_s" in seen:
        # Fewer steps where a callback stopped the run.
        trained = dataclasses.replace(trainer.task.step, steps=summary["steps"])
        try:
            now = training_terms(trained, settings.scaling.mesh, settings.scaling.device, trainer.measured_on)
            print(predicted.compare(now, seen["step_s"], newest[-1].get("val_loss")))
        except (ValueError, StorageFailed) as error:  # the run has ended well, and its data may be gone since
            logging.warning("not compared with what the search predicted: %s", error)
    first, last = (float.fromhex(summary["losses"][i]) for i in (0, -1))
    samples = (summary["samples_sha256"] or "unknown")[:16]
    kept = "bit-exact" if summary["exact"] else "sample-exact" if summary["samples_sha256"] else "not all on record"
    changed = " (the mesh changed)" if summary.get("mesh_changed") and not summary["exact"] else ""
    print(
        f"{summary['steps']} steps, loss {first:.3f} -> {last:.3f}, {len(summary['recoveries'])} "
        f"{'recovery' if len(summary['recoveries']) == 1 else 'recoveries'}, "
        f"{kept}{changed}\n"
        f"{goodput_line(cast(SummaryFile, summary))}\n"
        f"{COMPLETE.begins}{summary['weights_sha256'][:16]}, samples {samples}; all of it in "
        f"{settings.run.storage_uri}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
