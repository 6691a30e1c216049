"""The card (README.md) of an exported model: the run's data, steps, losses and optimizer, and how the model is loaded.

Of folders on this machine it has the last parts only, as it may be published.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from elastic_ring.errors import ElasticRingError
from elastic_ring.files import cut, printable
from elastic_ring.monitor.json_files import readable_json
from elastic_ring.monitor.metrics import METRICS_NAME, SUMMARY_NAME
from elastic_ring.monitor.metrics_log import STANDING, StepTable

log = logging.getLogger(__name__)

RATES = ("peak_lr", "min_lr", "schedule", "warmup_steps", "weight_decay", "betas", "eps", "clip_norm")

Rows = Sequence[tuple[str, str]]


def base_name(folder: str) -> str:
    """The hub's name of a folder in its cache; of another folder the last part."""
    hub = re.search(r"models--([\w.-]+)/snapshots/", folder)
    return hub[1].replace("--", "/") if hub else printable(PurePath(folder).name)


def training_rows(folder: Path, recorded: Any, num_steps: int | None, *, has_losses: bool = True) -> Rows:
    """What a run's records in `folder`, its config among them, say of its first `num_steps` steps; None: of all.

    Without `has_losses` the lines of these steps are of another branch of the run. Raises LookupError, TypeError or
    ValueError for a config that no run writes.
    """
    step, optim, identity = recorded["step"], recorded["optim"], recorded.get("identity", {})
    last = int((readable_json(folder / SUMMARY_NAME) or step)["steps"]) if num_steps is None else num_steps
    batch, context = int(step["global_batch"]), int(step["context_tokens"])
    rows = [("data", _data(recorded["data"]))] if recorded.get("data") else []
    rows += [
        ("steps", f"{last:,} of {int(step['steps']):,}, each of {batch:,} sequences of {context:,} tokens"),
        ("tokens", f"{last * batch * context:,}"),
        *(_losses(folder / METRICS_NAME, last) if has_losses else ()),
        ("computed in", str(step["param_dtype"])),
    ]
    own = str(identity.get("optimizer", "None"))
    name = str(optim.get("optimizer", "adamw")) if own == "None" else "one of the run's own"
    rates = RATES if "lr_schedule" not in identity else RATES[4:]  # that of the run's own is not in `optim`
    rows.append(("optimizer", ", ".join([name, *(f"{rate}={optim[rate]}" for rate in rates if rate in optim)])))
    return [(name, printable(cut(value, 400)).replace("|", "\\|")) for name, value in rows]


def _data(data: Any) -> str:
    paths = [PurePath(str(path)) for path in (data.get("uri"), *data.get("paths", ())) if path]
    names = [path.parent.name if path.name == "manifest.json" else path.name for path in paths]
    return " ".join([str(data["source"]), ", ".join(names)]).rstrip()


def _losses(path: Path, num_steps: int) -> Rows:
    """Of the last of so many steps, and of the last validation up to it; nothing where no line says it."""
    rows = []
    try:
        with StepTable.load(path, flaws=[]) as table:
            last = num_steps - 1
            line = next(table.lines(max(0, last)), None)
            if line is not None and line["step"] == last:
                rows.append(("training loss", f"{_number(line.get('loss'))} at the last step"))
            at = table.rows.last(num_steps, lambda rows: rows["validated"] == STANDING)
            if at >= 0:
                values = table.record(at, table.rows.get(at, at + 1)[0], "validation").items()
                text = ", ".join(f"{name} {_number(value)}" for name, value in values if name.startswith("val_"))
                rows.append(("validation", f"{text} after step {at + 1:,}"))
    except ElasticRingError as error:
        log.warning("the card has no losses: %s", error)
    return rows


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "not finite" if value is None else str(value)


def write_card(out: Path, title: str, rows: Rows, *, base: str, adapters: bool = False) -> None:
    """Write README.md into the folder `out` of a model, or of `adapters` above `base`. `base`: "" for none."""
    tags = ["elastic-ring", *(["lora"] if adapters else [])]
    front = [f"base_model: {json.dumps(base)}"] if base else []
    front += [f"library_name: {'peft' if adapters else 'transformers'}", "pipeline_tag: text-generation", "tags:"]
    loads = [f'model = AutoModelForCausalLM.from_pretrained("{base if adapters else out.name}")']
    imported = "AutoModelForCausalLM"
    if adapters:
        loads.append(f'model = PeftModel.from_pretrained(model, "{out.name}")')
    if (out / "tokenizer_config.json").is_file():
        imported += ", AutoTokenizer"
        loads.append(f'tokenizer = AutoTokenizer.from_pretrained("{out.name}")')
    lines = ["---", *front, *(f"- {tag}" for tag in tags), "---", "", f"# {out.name}", "", f"{title}.", ""]
    lines += ["| training | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "", "```python"]
    lines += ["from peft import PeftModel"] if adapters else []
    lines += [f"from transformers import {imported}", "", *loads, "```", ""]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")
