"""The settings of `elastic-ring train`: preset, then TOML file, then flags. No torch and no Ray in here.

Every field of every settings class is a dotted flag (`--scaling.dp`) and a key of the file (`[scaling] dp = 2`).
tyro makes the flags from the classes; values are checked once, when everything is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypedDict, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import tyro

from elastic_ring.cli import coloured
from elastic_ring.cli.data_settings import DataConfig, data_flag, prepared_data, validation_sets
from elastic_ring.cli.options import HELP_ALL, check_options, in_one_line, options_of, screen
from elastic_ring.cli.schedule import RATES, DefaultRates, default_rates, schedule_before, steps_of, usual_rates
from elastic_ring.config import OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.files import MAX_TOML_BYTES, plain_toml, read_small, shown_plain
from elastic_ring.model.config import ModelConfig, preset
from elastic_ring.validation import Flag, docstrings, from_plain, option_text, unknown_setting

T = TypeVar("T")
SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "scaling": ScalingConfig,
    "step": StepConfig,
    "optim": OptimConfig,
    "data": DataConfig,
    "run": RunConfig,
}


class Preset(TypedDict):
    model: ModelConfig
    scaling: ScalingConfig
    step: StepConfig
    optim: OptimConfig


def laptop(name: str = "laptop") -> Preset:
    """Two rings of two CPU ranks and a spare, a byte-level decoder of some million parameters: minutes on two cores."""
    return {
        "model": dataclasses.replace(preset(name), checkpoint_activations=False),
        "scaling": ScalingConfig(dp=2, cp=2, spares=1, resources_per_worker={"CPU": 0.25}),
        "step": StepConfig(steps=60, global_batch=4, context_tokens=2048),
        "optim": OptimConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=10, total_steps=60),
    }


def on_gpus(
    name: str,
    cp: int,
    dp: int,
    context_tokens: int,
    cpu_offload: Literal["none", "optimizer"] = "none",
    *,
    offload_activations: bool = False,
) -> Preset:
    """bfloat16 over fp32 master shards; one sequence for each ring and step. Every worker takes one GPU."""
    return {
        "model": dataclasses.replace(preset(name), offload_activations=offload_activations),
        "scaling": ScalingConfig(
            dp=dp, cp=cp, spares=1, device="cuda", resources_per_worker={"CPU": 1.0}, cpu_offload=cpu_offload
        ),
        "step": StepConfig(
            steps=1000, global_batch=dp, context_tokens=context_tokens, param_dtype="bfloat16", check_model=False
        ),
        "optim": OptimConfig(peak_lr=3e-4, min_lr=3e-5, warmup_steps=100, total_steps=1000),
    }


PRESETS: dict[str, Callable[[], Preset]] = {
    "laptop": laptop,
    "100m": partial(on_gpus, "100m", 2, 2, 32_768),
    "1b": partial(on_gpus, "1b", 2, 2, 131_072),
    "8b": partial(on_gpus, "8b", 4, 2, 131_072),
    "70b": partial(on_gpus, "70b", 32, 2, 524_288),
    "1t": partial(on_gpus, "1t", 320, 2, 1_048_576, "optimizer", offload_activations=True),
    "moe-laptop": partial(laptop, "moe-laptop"),
    "30b-a3b": partial(on_gpus, "30b-a3b", 16, 2, 131_072),
    "1t-moe": partial(on_gpus, "1t-moe", 384, 2, 1_048_576, "optimizer"),
}
FITS: dict[str, str] = {
    **{"100m": "A100-40", "1b": "A100-40", "8b": "H100-80", "70b": "H200"},
    **{"1t": "H100-80", "30b-a3b": "H100-80", "1t-moe": "H100-80"},
}
"""The smallest GPU of `gpus` that a rank of a preset fits. The laptops need none."""
NESTED = {"timeouts", "checkpoint_config"}
"""Settings of RunConfig that have settings of their own."""
NONE = "none"
"""What stands for None in a TOML file, which has no such value."""

TOP = (
    *("pattern", "search", "machine", "model_folder", "from_run", "windows"),
    *("lora", "validate", "stop_early", "keep_best"),
)
"""Keys of the file beside `preset` that belong to no section; flags of the same name win over them."""
FREE_OF_FOLDER = frozenset({"checkpoint_activations", "loss_chunk_tokens"})
"""Settings of [model] that a model folder does not decide."""


def short_of(spec: Any) -> str | None:
    """The name of a field's short flag."""
    return next((str(mark) for mark in spec.metadata if isinstance(mark, Flag)), None)


def _shorts(cls: Any, prefix: str) -> dict[str, str]:
    shorts: dict[str, str] = {}
    for name, spec in cls.__pydantic_fields__.items():
        if name in NESTED:
            shorts |= _shorts(spec.annotation, f"{prefix}{name}.")
        elif (short := short_of(spec)) is not None:
            shorts[short] = f"{prefix}{name}"
    return shorts


SHORT = {short: long for section, cls in SECTIONS.items() for short, long in _shorts(cls, f"{section}.").items()}
"""The settings that have a short flag, by its name."""


@dataclasses.dataclass(frozen=True)
class ShortFlags:
    """The flags of no single setting; the sections below have every setting, some with a short flag beside."""

    preset: Literal["laptop", "100m", "1b", "8b", "70b", "1t", "moe-laptop", "30b-a3b", "1t-moe"] = "laptop"
    """Model, mesh and steps. For GPUs of: 100m and 1b A100-40, 8b, 1t, 30b-a3b and 1t-moe H100-80, 70b H200."""
    config: Path | None = None
    """A TOML file of settings over the preset's; config.toml of an earlier run is one."""
    epochs: float | None = None
    """Instead of steps: how often each sequence of the data is used."""
    extend: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with the finished run of this name for more --steps, at the rate with which its schedule ended."""
    replan: tyro.conf.FlagCreatePairsOff[bool] = False
    """With --extend: the further steps have a warm-up and a decay of their own, in the proportion of the first ones."""
    validate: str | None = None
    """Sets to validate on: code=DATA,weight=2,sequences=64; held. DATA is as for --data; without it, held-out
    sequences."""
    stop_early: str | None = None
    """Stop when the loss of the validations has not improved in so many of them; METRIC:N follows another metric, such
    as val_code_loss:3."""
    keep_best: str | None = None
    """Keep the checkpoint where this metric of the validations, such as val_loss, is the least."""
    data: str | None = None
    """A manifest of elastic-ring data prepare, files of text or records (path, directory or glob), or shards:URI;
    Python's own library if left out."""
    machine: str | None = None
    """Measured costs for --layout auto: a file of elastic-ring calibrate."""
    pattern: str | None = None
    """Which keys attention keeps: a JSON file, or sinks:64+window:512;dense@3, or topk:8; all if left out."""
    search: str | None = None
    """The --out of the search that found the pattern: the end says its step and loss beside those seen."""
    model_folder: str | None = None
    """A Hugging Face decoder in place of the preset's: a folder with its config, and its weights if they are there."""
    from_run: Annotated[Union[str, None], tyro.conf.arg(name="from")] = None  # noqa: UP007 (as `_argument`)
    """Begin with the weights of this run, or of one of its checkpoints: a new optimizer, from step 0."""
    windows: Literal["exact", "blocks", "dense"] | None = None
    """Its sliding windows: exact; in blocks of 128 tokens, faster on GPUs; dense: ignored."""
    lora: str | None = None
    """Train adapters of peft on its layers, and freeze the rest: r=16,alpha=32,target=q_proj+v_proj, or all-linear."""
    cpus_per_worker: float | None = None
    """Of Ray's CPUs, which are a count and no limit."""
    plan: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print what the run needs, and start nothing."""


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """All arguments of `elastic-ring train`, checked."""

    preset: str
    model: ModelConfig
    scaling: ScalingConfig
    step: StepConfig
    optim: OptimConfig
    data: DataConfig
    run: RunConfig
    pattern: str | None = None
    search: str | None = None
    machine: str | None = None
    model_folder: str | None = None
    from_run: str | None = None
    windows: str | None = None
    lora: str | None = None
    validate: str | None = None
    stop_early: str | None = None
    keep_best: str | None = None
    plan: bool = False
    rates: DefaultRates | None = dataclasses.field(default=None, compare=False)
    """What of the learning rate nobody gave, in a run on trained weights."""

    def toml(self) -> str:
        """As a file for `--config`, without what may be secret: values of run.env, passwords and queries of URIs. Also
        without the schedule's lengths where they follow from the number of steps: `--steps` over the file changes them
        too."""
        import tomli_w

        plain = {name: plain_of(getattr(self, name)) for name in SECTIONS}
        plain["run"].pop("env")
        steps, of_preset = self.step.steps, PRESETS[self.preset]()["optim"]
        follow = {"total_steps": steps, "warmup_steps": min(of_preset.warmup_steps, steps)}
        if self.model_folder is not None or self.from_run is not None:
            follow["warmup_steps"] = usual_rates(self.optim.peak_lr, self.optim.total_steps)["warmup_steps"]
        plain["optim"] = {name: value for name, value in plain["optim"].items() if follow.get(name) != value}
        if self.model_folder is not None:
            plain["model"] = {name: plain["model"][name] for name in sorted(FREE_OF_FOLDER)}
        own = {name: value for name in TOP if (value := getattr(self, name)) is not None}
        return tomli_w.dumps(shown_plain({"preset": self.preset, **own, **plain}))


def plain_of(config: Any) -> dict[str, object]:
    """A settings object as TOML can say it: faults as text, None as "none", or left out where any text may stand."""
    plain: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "faults":
            value = "; ".join(map(str, value)) or NONE
        elif dataclasses.is_dataclass(value):
            value = plain_of(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif value is None and str in get_args(_type_of(type(config), field.name)):
            continue
        plain[field.name] = NONE if value is None else value
    return plain


def _type_of(cls: Any, name: str) -> Any:
    return cls.__pydantic_fields__[name].annotation


@dataclasses.dataclass(frozen=True)
class SettingsFile:
    """A TOML file of settings whose names are known: tables by section, and the texts that stand beside them."""

    tables: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def has(self, setting: str) -> bool:
        """Whether the file sets `SECTION.NAME`."""
        section, _, name = setting.partition(".")
        return name in self.tables.get(section, {})


def parse(argv: Sequence[str]) -> TrainSettings:
    """The settings that the arguments ask for. Raises ValueError for contradictory settings and options that do not
    exist; exits for --help and --help-all."""
    known_args = _first_arguments(argv)
    file = read_toml(known_args.config) if known_args.config is not None else SettingsFile()
    name = known_args.preset or file.texts.get("preset", "laptop")
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}: must be one of {', '.join(PRESETS)}")
    of_preset = PRESETS[name]()
    base = {"data": DataConfig(), "run": RunConfig(name=f"train-1t-{name}"), **of_preset}
    plain = {section: _merged(plain_of(base[section]), file.tables.get(section, {})) for section in SECTIONS}
    for section in SECTIONS.keys() & file.tables.keys():  # before flags take what the file says for their defaults
        from_plain(SECTIONS[section], _with_none(SECTIONS[section], plain[section]), f"{section}.")
    flags, values = _parse_flags(argv, plain)
    if flags.cpus_per_worker is not None:
        values["scaling"]["resources_per_worker"] = {"CPU": flags.cpus_per_worker}
    if flags.data is not None:
        values["data"] |= data_flag(flags.data, values["data"])

    def is_set(setting: str) -> bool:
        return file.has(setting) or has_flag(argv, setting)

    def checked(section: str, cls: type[T]) -> T:
        return from_plain(cls, _with_none(cls, values[section]), f"{section}.")

    model, scaling, step = checked("model", ModelConfig), checked("scaling", ScalingConfig), checked("step", StepConfig)
    data, run = checked("data", DataConfig), checked("run", RunConfig)
    if data.source == "prepared":
        data, model = prepared_data(data, model, vocabulary_is_chosen=is_set("model.vocab_size"))
    top: dict[str, str | None] = {
        key: file.texts.get(key) if (value := getattr(flags, key)) is None else value for key in TOP
    }
    if top["model_folder"] is not None and not is_set("step.check_model"):  # presets leave it out for their own decoder
        step = dataclasses.replace(step, check_model=True)
    if flags.epochs is not None:
        if has_flag(argv, "step.steps"):
            raise ValueError(f"epochs={flags.epochs:g} beside steps: give one of them")
        step = dataclasses.replace(step, steps=steps_of(flags.epochs, data, model, step, top["validate"]))
    # config.toml of a run says both; a file that says only that layers recompute means that nothing is kept
    file_recomputes = file.has("model.checkpoint_activations") and not file.has("scaling.keep_activations")
    recomputes = model.checkpoint_activations and (file_recomputes or has_flag(argv, "model.checkpoint_activations"))
    if scaling.keep_activations == "auto" and recomputes:
        scaling = dataclasses.replace(scaling, keep_activations=False)
    _check_folder(top, is_set)
    chosen = {setting for setting in values["optim"] if is_set(f"optim.{setting}")}
    if flags.replan and not flags.extend:
        raise ValueError("replan=True: plans the further steps of a finished run; give --extend too, or leave it out")
    if flags.extend:
        before = schedule_before(run, step.steps, replans=flags.replan)
        # A file, such as an earlier run's config.toml, does not know the later plans.
        later = {"replanned", "total_steps"} if flags.replan else {"replanned"}
        chosen -= {setting for setting in later if not has_flag(argv, f"optim.{setting}")}
        values["optim"] |= {setting: length for setting, length in before.items() if setting not in chosen}
        chosen |= before.keys()
    rates = _fill_schedule(values["optim"], chosen, of_preset["optim"], step.steps, top, is_planned=flags.plan)
    if top["search"] is not None:  # the same command may be given again elsewhere, with the run's config.toml
        top["search"] = os.path.abspath(top["search"])
    if top["validate"] is not None:
        top["validate"] = "; ".join(map(str, validation_sets(top["validate"])))
    optim = checked("optim", OptimConfig)
    return TrainSettings(name, model, scaling, step, optim, data, run, plan=flags.plan, rates=rates, **top)


def _first_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Preset and file, which the other arguments stand on. Raises ValueError for options that do not exist; exits for
    help."""
    options = options_of(ShortFlags, SECTIONS, SHORT)
    if {"-h", "--help"} & set(argv):
        print(screen(options, len(options) - len(SHORT)))
        raise SystemExit(0)
    if HELP_ALL in argv:
        _print_all_options()
        raise SystemExit(0)
    check_options(argv, options)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset")
    first.add_argument("--config", type=Path)
    try:
        return first.parse_known_args(argv)[0]
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: must have a value") from error


def _fill_schedule(
    optim: dict[str, object],
    chosen: Set[str],
    of_preset: OptimConfig,
    steps: int,
    top: Mapping[str, str | None],
    *,
    is_planned: bool,
) -> DefaultRates | None:
    """Set the lengths and, for trained weights, the rates that were not `chosen`; returns those rates."""
    if "total_steps" not in chosen:  # the schedule is as long as the run
        optim["total_steps"] = steps
    unset, has_run = {*RATES} - chosen, top["from_run"] is not None
    if unset and not is_planned and (top["model_folder"] is not None or has_run):
        values = cast("Mapping[str, float]", optim)
        rates = default_rates(values, unset, lora=top["lora"] is not None, has_run=has_run)
        optim |= rates.values
        return rates
    if "warmup_steps" not in chosen:
        optim["warmup_steps"] = min(of_preset.warmup_steps, steps)
    return None


def _check_folder(top: Mapping[str, str | None], is_set: Callable[[str], bool]) -> None:
    """Raises ValueError for settings of a model that a folder decides, and for settings of a folder without one."""
    if top["from_run"] is not None and top["lora"] is not None:
        raise ValueError(
            f"from={top['from_run']!r} beside lora: adapters begin on the weights of a folder; write one with "
            "elastic-ring export and name it with --model-folder"
        )
    if top["model_folder"] is None:
        if top["lora"] is not None:
            raise ValueError(
                f"lora={top['lora']!r}: adapts the weights of a model folder, and a preset has none; name one with "
                "--model-folder"
            )
        if top["windows"] is not None:
            raise ValueError(
                f"windows={top['windows']!r}: says how a model folder's windows are kept; --model-folder "
                "names none. For other models give --pattern"
            )
        return
    for setting in ModelConfig.__pydantic_fields__:  # type: ignore[attr-defined]
        if setting not in FREE_OF_FOLDER and is_set(f"model.{setting}"):
            raise ValueError(f"model.{setting}: the folder of --model-folder decides it; leave it out")


def has_flag(argv: Sequence[str], setting: str) -> bool:
    """Whether the arguments have the setting's flag, the dotted or the short one, with - or _ as tyro reads it."""
    names = {f"__{name}" for name in (setting, *(short for short, long in SHORT.items() if long == setting))}
    return any(word.partition("=")[0].replace("-", "_") in names for word in argv)


def read_toml(path: Path) -> SettingsFile:
    """A file of settings. Raises ValueError for a file that cannot be read and for unknown keys."""
    try:
        plain = plain_toml(read_small(path, MAX_TOML_BYTES, is_asked=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: cannot be read as TOML ({error})") from error
    top = ["preset", *TOP, *SECTIONS]
    for key, value in plain.items():
        if key not in top:
            raise ValueError(f"--config {path}: {unknown_setting('the file', key, top)}")
        if key in SECTIONS:
            _check_keys(SECTIONS[key], value, f"{key}.", path)
        elif key == "lora" and isinstance(value, Mapping):  # a table of peft's options
            plain[key] = option_text(value)
        elif not isinstance(value, str):
            raise ValueError(f"--config {path}: {key}={value!r}: must be text")
    tables = {key: plain.pop(key) for key in SECTIONS if key in plain}
    return SettingsFile(tables, plain)


def _check_keys(cls: Any, table: object, prefix: str, path: Path) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"--config {path}: {prefix[:-1]}={table!r}: must be a table, [{prefix[:-1]}]")
    names = list(cls.__pydantic_fields__)
    for key, value in table.items():
        if key not in names:
            raise ValueError(f"--config {path}: {unknown_setting(prefix[:-1], key, names)}")
        if key in NESTED:
            _check_keys(_type_of(cls, key), value, f"{prefix}{key}.", path)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, object]:
    return {**base, **over, **{name: {**base[name], **over.get(name, {})} for name in NESTED & base.keys()}}


def _with_none(cls: Any, plain: Mapping[str, Any]) -> dict[str, object]:
    """With None where "none" stands for it."""
    optional = {name for name in plain if type(None) in get_args(_type_of(cls, name))}
    values = {name: None if value == NONE and name in optional else value for name, value in plain.items()}
    return values | {name: _with_none(_type_of(cls, name), plain[name]) for name in NESTED & plain.keys()}


def _parse_flags(
    argv: Sequence[str], plain: Mapping[str, Mapping[str, object]]
) -> tuple[Any, dict[str, dict[str, object]]]:
    """The flags of no single setting, and every setting by section with the others over `plain`. As tyro takes its time
    for each flag it gets only those that `argv` may name, without help. Raises ValueError."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            chosen = {section: _flags_of(cls, plain[section], f"{section}.", argv) for section, cls in SECTIONS.items()}
            hints = get_type_hints(ShortFlags, include_extras=True)
            bare = [
                (field.name, _argument(hints[field.name], ""), dataclasses.field(default=field.default))
                for field in dataclasses.fields(ShortFlags)
            ]
            parsed = _tyro(
                argv,
                dataclasses.make_dataclass("ShortFlags", bare),
                {section: flag_class for section, flag_class in chosen.items() if dataclasses.fields(flag_class)},
            )
    except SystemExit as end:
        raise ValueError(in_one_line(printed.getvalue())) from end
    values = {
        section: _plain_flags(getattr(parsed, section)) if hasattr(parsed, section) else {} for section in SECTIONS
    }
    return parsed.short, {section: _merged(plain[section], values[section]) for section in SECTIONS}


def _print_all_options() -> None:
    base = {"data": DataConfig(), "run": RunConfig(name="train-1t-laptop"), **laptop()}
    sections = {section: _flags_of(SECTIONS[section], plain_of(base[section])) for section in SECTIONS}
    with coloured(), suppress(SystemExit):
        _tyro(["--help"], ShortFlags, sections)


def _tyro(argv: Sequence[str], short: Any, sections: Mapping[str, type[Any]]) -> Any:
    fields: list[tuple[str, Any, Any]]
    fields = [("short", Annotated[short, tyro.conf.arg(name="")], dataclasses.field(default_factory=short))]
    fields += [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in sections.items()]
    return tyro.cli(
        dataclasses.make_dataclass("Train", fields),
        args=list(argv),
        prog="elastic-ring train",
        description="Train a decoder over elastic rings. Precedence: preset, --config, flags.",
    )


def _argument(kind: Any, says: str, short: str | None = None) -> Any:
    """A type with its help. For `int | None` tyro would import typeguard, for `Union` it does not."""
    inner, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    plain = Union[get_args(inner)] if isinstance(inner, UnionType) else inner  # noqa: UP007
    aliases = [f"--{short.replace('_', '-')}"] if short else None
    return Annotated[(plain, *marks, tyro.conf.arg(help=says, aliases=aliases))]


def _flags_of(cls: Any, plain: Mapping[str, Any], prefix: str = "", argv: Sequence[str] | None = None) -> Any:
    """A dataclass for tyro with the fields of `cls`, unchecked, whose defaults are `plain`; mappings are NAME=VALUE.
    With `argv` only the fields that it may name, without help."""
    fields: list[Any] = []
    help_texts = docstrings(cls) if argv is None else {}
    is_named = argv is None or any(word.replace("-", "_").startswith(f"__{prefix}") for word in argv)
    for name, spec in cls.__pydantic_fields__.items():
        kind, default, says = spec.annotation, plain.get(name), help_texts.get(name, "")
        if name in NESTED:
            kind = _flags_of(kind, plain[name], f"{prefix}{name}.", argv)
            if dataclasses.fields(kind):
                fields.append((name, kind, dataclasses.field(default_factory=kind)))
            continue
        if not is_named and not (argv is not None and has_flag(argv, f"{prefix}{name}")):
            continue
        if name == "faults":
            kind = str
        elif get_origin(kind) is Mapping:
            kind, default = str, ",".join(f"{key}={value}" for key, value in default.items()) if default else ""
            says += " NAME=VALUE, separated by commas." * (argv is None)
        elif isinstance(default, list):
            default = tuple(default)
        elif default == NONE and type(None) in get_args(kind):
            default = None
        fields.append((name, _argument(kind, says, short_of(spec)), dataclasses.field(default=default)))
    return dataclasses.make_dataclass(cls.__name__, fields)


def _plain_flags(flags: Any) -> dict[str, object]:
    plain: dict[str, object] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            value = _plain_flags(value)
        elif field.name in ("resources_per_worker", "env"):
            pairs = [part.partition("=") for part in value.split(",") if part.strip()]
            if not all(equals for _, equals, _ in pairs):
                raise ValueError(f"{field.name}={value!r}: write NAME=VALUE, separated by commas")
            value = {key.strip(): amount for key, _, amount in pairs}
            if field.name == "resources_per_worker":
                value = {key: _number(amount) for key, amount in value.items()}
        plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # the check of resources_per_worker refuses it
