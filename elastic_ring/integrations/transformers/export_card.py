"""The card (README.md) of an exported model: the run's data, steps, losses and optimizer, and how the model is loaded.

Of folders on this machine it has the last parts only, as it may be published.
"""

from __future__ import annotations

import html
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

RATES = ("peak_lr", "min_lr", "schedule", "warmup_steps")
ADAMW = ("weight_decay", "betas", "eps")

Rows = Sequence[tuple[str, str]]


def base_name(folder: str) -> str:
    """The hub's name of a folder in its cache; of another folder ./ and its last part: no name of the hub's."""
    hub = re.search(r"models--([\w.-]+)/snapshots/", folder)
    return hub[1].replace("--", "/") if hub else f"./{printable(PurePath(folder).name)}"


def training_rows(folder: Path, recorded: Any, num_steps: int | None, branch: str = "") -> Rows:
    """What a run's records in `folder`, its config among them, say of its first `num_steps` steps; None: of all that
    its summary counts. `branch`: why the lines of these steps may be another branch's.

    Raises LookupError, TypeError or ValueError for a config that no run writes.
    """
    step, optim, identity = recorded["step"], recorded["optim"], recorded.get("identity", {})
    summary = readable_json(folder / SUMMARY_NAME)
    last = int(summary["steps"]) if num_steps is None and summary else num_steps
    batch, context = int(step["global_batch"]), int(step["context_tokens"])
    rows = [("data", _data(recorded["data"]))] if recorded.get("data") else []
    rows += [("branch", branch)] if branch else []
    if last is not None:
        rows += [
            ("steps", f"{last:,} of {int(step['steps']):,}, each of {batch:,} sequences of {context:,} tokens"),
            ("tokens", f"{last * batch * context:,}"),
            *(_losses(folder / METRICS_NAME, last) if not branch else ()),
        ]
    rows.append(("computed in", str(step["param_dtype"])))
    if "optimizer" in identity:  # DeepSpeed's is in its own config
        is_own = str(identity["optimizer"]) != "None"
        name = "one of the run's own" if is_own else str(optim.get("optimizer", "adamw"))
        rates = [*(RATES if "lr_schedule" not in identity else ()), "clip_norm", *(() if is_own else ADAMW)]
        rows.append(("optimizer", ", ".join([name, *(f"{rate}={optim[rate]}" for rate in rates if rate in optim)])))
    return [(name, html.escape(printable(cut(value, 400)), quote=False).replace("|", "\\|")) for name, value in rows]


def _data(data: Any) -> str:
    """Of a user's own source the name alone, if its fields are no places."""
    places = data.get("paths")
    places = [data.get("uri"), *(places if isinstance(places, (list, tuple)) else ())]
    paths = [PurePath(place) for place in places if isinstance(place, str) and place]
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
                rows.append(("training loss", f"{_number(line.get('loss'))} after step {num_steps:,}"))
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
    front = [f"base_model: {json.dumps(base)}"] if base and not base.startswith(".") else []
    front += [f"library_name: {'peft' if adapters else 'transformers'}", "pipeline_tag: text-generation", "tags:"]
    name = out.resolve().name
    loads = [f"model = AutoModelForCausalLM.from_pretrained({json.dumps(base if adapters else name)})"]
    imported = "AutoModelForCausalLM"
    if adapters:
        loads.append(f"model = PeftModel.from_pretrained(model, {json.dumps(name)})")
    if (out / "tokenizer_config.json").is_file():
        imported += ", AutoTokenizer"
        loads.append(f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})")
    lines = ["---", *front, *(f"- {tag}" for tag in tags), "---", "", f"# {html.escape(name)}", "", f"{title}.", ""]
    lines += ["| training | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "", "```python"]
    lines += ["from peft import PeftModel"] if adapters else []
    lines += [f"from transformers import {imported}", "", *loads, "```", ""]
    (out / "README.md").write_text("\n".join(lines), encoding="utf-8")
