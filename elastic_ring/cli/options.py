"""The words of `elastic-ring train`: one screen of help, and the right name for an option that does not exist."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_ring.validation import docstrings

HELP_ALL = "--help-all"
NUM_SUGGESTED = 3
WIDTH, INDENT = 100, 27
SCREEN = (
    *("preset", "config", "model_folder", "lora", "data", "context", "steps", "epochs", "global_batch"),
    *("optim.peak_lr", "dp", "cp", "spares", "device", "checkpoint_every_steps", "validate", "pattern"),
    *("run_name", "storage_path", "resume", "plan"),
)
"""What `--help` shows: what a first run, a fine-tuning and a long run ask for."""
SAYINGS = (
    (
        r"Error parsing (--[^/:]+)[^:]*: invalid literal for int\(\) with base 10: (.*)",
        r"\1=\2: must be a whole number",
    ),
    (r"Error parsing (--[^/:]+)[^:]*: could not convert string to float: (.*)", r"\1=\2: must be a number"),
    (r"invalid choice (.*) for argument '(--[^/']+)[^']*'\. Expected (.*?)\.?$", r"\2=\1: must be \3"),
    (r"Missing value for argument '(--[^/']+).*", r"\1: must have a value"),
    (r"Unrecognized options: (.*)", r"\1: belongs to no option"),
)
"""What tyro says, and how it is said here."""
_QUOTED = re.compile(r"'([^']*)'")
FOREIGN: Mapping[str, tuple[str, ...]] = {
    "max_steps": ("steps", "epochs"),
    "num_steps": ("steps",),
    "iters": ("steps",),
    "train_iters": ("steps",),
    "num_train_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "learning_rate": ("optim.peak_lr", "optim.min_lr"),
    "lr": ("optim.peak_lr", "optim.min_lr"),
    "min_lr": ("optim.min_lr",),
    "warmup_steps": ("optim.warmup_steps",),
    "lr_scheduler_type": ("optim.schedule",),
    "batch_size": ("global_batch", "context"),
    "global_batch_size": ("global_batch",),
    "per_device_train_batch_size": ("global_batch",),
    "micro_batch_size": ("global_batch",),
    "gradient_accumulation_steps": ("global_batch",),
    "seq_len": ("context",),
    "seq_length": ("context",),
    "max_length": ("context",),
    "max_seq_length": ("context",),
    "block_size": ("context",),
    "output_dir": ("storage_path", "run_name", "run_dir"),
    "output": ("storage_path", "run_name", "run_dir"),
    "logging_dir": ("storage_path", "run_name"),
    "save_steps": ("checkpoint_every_steps",),
    "save_interval": ("checkpoint_every_steps",),
    "save_total_limit": ("checkpoint_keep_last",),
    "resume_from_checkpoint": ("resume", "from"),
    "load": ("resume", "from"),
    "eval_steps": ("val_every",),
    "eval_dataset": ("validate",),
    "gpus": ("dp", "cp", "spares"),
    "num_gpus": ("dp", "cp", "spares"),
    "nproc_per_node": ("dp", "cp", "spares"),
    "num_workers": ("dp", "cp", "spares"),
    "nnodes": ("dp", "cp", "spares"),
    "data_parallel_size": ("dp",),
    "context_parallel_size": ("cp",),
    "model": ("model_folder", "preset"),
    "model_name": ("model_folder", "preset"),
    "model_name_or_path": ("model_folder", "preset"),
    "dataset": ("data",),
    "train_file": ("data",),
    "use_peft": ("lora",),
    "lora_r": ("lora",),
    "lora_rank": ("lora",),
    "bf16": ("step.param_dtype",),
    "dtype": ("step.param_dtype", "model.dtype"),
    "precision": ("step.param_dtype",),
    "gradient_checkpointing": ("model.checkpoint_activations", "scaling.keep_activations"),
    "name": ("run_name",),
}
"""Names that other trainers use for what these options set, the nearest first."""


@dataclasses.dataclass(frozen=True)
class Option:
    """name: as it is written after `--`, with underscores. says: the docstring of its field."""

    name: str
    says: str


def options_of(
    shorts: type[Any], sections: Mapping[str, type[Any]], short_names: Mapping[str, str]
) -> dict[str, Option]:
    """Every option by name: fields of `shorts`, dotted fields of the sections, and `short_names` for some of those."""
    texts = docstrings(shorts)
    options = {
        name: Option(name, texts.get(field.name, ""))
        for field in dataclasses.fields(shorts)
        for name in [field.name.removesuffix("_run") if field.name == "from_run" else field.name]
    }
    options |= {option.name: option for section, cls in sections.items() for option in _fields(cls, f"{section}.")}
    return options | {short: dataclasses.replace(options[long], name=short) for short, long in short_names.items()}


def _fields(cls: type[Any], prefix: str) -> Iterator[Option]:
    texts, fields = docstrings(cls), getattr(cls, "__pydantic_fields__", {})
    for name, spec in fields.items():
        if hasattr(spec.annotation, "__pydantic_fields__"):
            yield from _fields(spec.annotation, f"{prefix}{name}.")
        else:
            yield Option(f"{prefix}{name}", texts.get(name, ""))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def screen(options: Mapping[str, Option], num_all: int) -> str:
    """The options that most runs need, a line each."""
    lines = [
        "usage: elastic-ring train [OPTIONS]",
        "",
        "Train a decoder over elastic rings. Precedence: preset, --config, flags.",
        "",
    ]
    for name in SCREEN:
        says = " ".join(options[name].says.split()).partition(". ")[0].rstrip(".")
        lines.append(f"  {flag(name):<{INDENT - 2}}{textwrap.shorten(says, WIDTH - INDENT, placeholder=' ...')}")
    return "\n".join([*lines, "", f"--help-all prints all {num_all} options, with types and defaults."])


def check_options(argv: Sequence[str], options: Mapping[str, Option]) -> None:
    """Raises ValueError for an option that does not exist, with at most three that do, the likeliest first."""
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if not word.startswith("--") or not name or name in options or _switched_off(name) in options:
            continue
        meant = suggestions(name, options)
        hint = f"did you mean {' or '.join(map(flag, meant))}?" if meant else "--help-all lists all"
        raise ValueError(f"{word.partition('=')[0]}: there is no such option; {hint}")


def _switched_off(name: str) -> str:
    owner, dot, last = name.rpartition(".")
    return f"{owner}{dot}{last.removeprefix('no_')}"


def suggestions(name: str, options: Mapping[str, Option]) -> list[str]:
    """At most three options that `name` may mean, the likeliest first."""
    last = name.rpartition(".")[2]
    by_last = {option.rpartition(".")[2]: option for option in options}
    names = [*FOREIGN.get(last, ()), *([by_last[last]] if last in by_last else [])]
    near = difflib.get_close_matches(last, {**by_last, **dict.fromkeys(FOREIGN)}, n=NUM_SUGGESTED, cutoff=0.7)
    for close in () if names else near:
        names += FOREIGN.get(close, (by_last.get(close, close),))
    return list(dict.fromkeys(names))[:NUM_SUGGESTED]


def in_one_line(box: str) -> str:
    """What tyro says in a box up to its first rule, in our words."""
    rows = [line.strip("│╭╮╰╯|+ ") for line in box.splitlines()]
    rows = [row for row in rows if row][1:] if rows else []
    while rows and not rows[0].strip("─-"):
        del rows[0]
    message = " ".join(itertools.takewhile(lambda row: row.strip("─-"), rows))
    for pattern, ours in SAYINGS:
        message = re.sub(pattern, ours, message)
    return re.sub(r"one of \((.*)\)", lambda match: f"one of {', '.join(sorted(_QUOTED.findall(match[1])))}", message)
