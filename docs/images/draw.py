"""Draws the pictures of README and docs as SVG.

    python docs/images/draw.py                      # from loss_curve.json, which is committed
    python docs/images/draw.py KILLED UNDISTURBED   # take the losses of two run folders first

`KILLED` and `UNDISTURBED` are folders of `elastic-ring train` runs of the same settings, with and without `--faults`.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INK, GREY, BLUE, RED, GREEN, PALE = "#1f2328", "#6e7781", "#0969da", "#cf222e", "#1a7f37", "#f6f8fa"


def svg(width: int, height: int, parts: list[str]) -> str:
    """A whole drawing on white, so that it can be read on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="Helvetica, Arial, sans-serif">'
    )
    arrow = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        f' orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker></defs>'
    )
    return "\n".join([head, arrow, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>\n"])


def text(
    x: float, y: float, words: str, size: int = 13, color: str = INK, anchor: str = "middle", bold: int = 0
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}'
    return f"<text {place}>{escape(words)}</text>"


def box(x: float, y: float, w: float, h: float, lines: list[str], color: str = INK, fill: str = "#ffffff") -> str:
    """A box whose first line is its name."""
    top = y + h / 2 - 8 * len(lines) + 12
    words = [
        text(x + w / 2, top + 16 * i, line, 13 if i == 0 else 11, color if i == 0 else GREY, bold=i == 0)
        for i, line in enumerate(lines)
    ]
    frame = f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{color}"/>'
    return "\n".join([frame, *words])


def line(path: str, color: str = GREY, dashed: bool = False, both: bool = False, width: float = 1.4) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    start = ' marker-start="url(#a)"' if both else ""
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}" marker-end="url(#a)"{start}{dash}/>'


def architecture() -> str:
    """Processes and what goes between them, for two rings of two ranks and a spare on two nodes."""

    def node(x: float, w: float, name: str) -> list[str]:
        panel = f'<rect x="{x:g}" y="170" width="{w:g}" height="300" rx="8" fill="{PALE}" stroke="#d0d7de"/>'
        agent = box(x + 16, 208, w - 32, 44, ["node agent", "pidfd on each worker, progress stamps, kills by PID"])
        return [panel, text(x + 14, 192, name, 12, GREY, "start"), agent]

    def worker(x: float, number: int, place: str) -> str:
        return box(x, 310, 112, 74, [f"worker {number}", place, "K/V slice,", "ZeRO-3 shard"], BLUE)

    parts = [
        box(20, 40, 200, 70, ["driver", "ElasticRingTrainer.fit()", "follows the run, holds no state"]),
        box(
            330,
            30,
            300,
            90,
            [
                "coordinator (Ray actor)",
                "control core, a pure function:",
                "(state, event, now) -> (state, commands, reason)",
                "no Ray, no torch, no clock",
            ],
        ),
        box(740, 40, 200, 70, ["run folder", "journal.jsonl before a command", "leaves; metrics, status, summary"]),
        line("M220 75 L330 75", both=True),
        text(275, 66, "run spec, steps", 11, GREY),
        line("M630 75 L740 75"),
        text(685, 66, "decisions", 11, GREY),
        *node(20, 390, "node 0"),
        *node(430, 510, "node 1"),
        line("M440 120 L240 208", both=True),
        line("M520 120 L690 208", both=True),
        text(330, 150, "commands, reports", 11, GREY, "end"),
        text(616, 150, "deaths, hangs, node losses", 11, GREY, "start"),
        worker(56, 0, "dp 0, cp 0"),
        worker(262, 1, "dp 0, cp 1"),
        worker(450, 2, "dp 1, cp 0"),
        worker(640, 3, "dp 1, cp 1"),
        box(816, 310, 108, 74, ["spare", "imports done,", "kernels compiled,", "no rank"], GREEN),
        line("M168 347 L262 347", both=True),
        text(215, 338, "K/V hops,", 11, GREY),
        text(215, 364, "FSDP2", 11, GREY),
        line("M562 347 L640 347", both=True),
        text(601, 338, "K/V hops,", 11, GREY),
        text(601, 364, "FSDP2", 11, GREY),
        text(215, 290, "ring 0: one sequence", 12),
        text(601, 290, "ring 1: another sequence", 12),
        line("M112 384 C112 430 506 430 506 384", both=True),
        line("M318 384 C318 430 696 430 696 384", both=True),
        text(215, 438, "gradients summed over the rings, one vote a step", 11, GREY),
        line("M340 384 C380 468 850 468 868 384", GREEN, dashed=True),
        text(640, 462, "after a death: the same cp_rank of another ring heals the spare", 11, GREEN),
    ]
    return svg(960, 490, parts)


def attention() -> str:
    """How one attention call goes from its pattern to its merged result, with the files that do it."""

    def at(x: float, y: float, lines: list[str], color: str = INK) -> str:
        return box(x, y, 200, 78, lines, color)

    parts = [
        text(120, 24, "what is seen", 12, GREY),
        text(360, 24, "who computes and sends what", 12, GREY),
        text(600, 24, "one pass", 12, GREY),
        text(840, 24, "one tile", 12, GREY),
        at(20, 40, ["pattern", "patterns/rules.py", "patterns/families.py", "patterns/parse.py"]),
        at(20, 160, ["layout", "layouts/layout.py", "autolayout.py chooses"]),
        at(260, 100, ["schedule", "plan/schedule.py", "plan/sparse_schedule.py", "hops, ranges, bytes"]),
        at(260, 250, ["rank's plan", "plan/rank_plan.py", "plan/sparse_blocks.py", "stages, calls, pieces"]),
        at(500, 100, ["ring", "ring.py: one loop", "lowering: calls as data", "rectangles, tiles, blocks"], BLUE),
        at(500, 250, ["exchange", "comm/exchange.py", "plan/traffic.py", "pieces of K/V, of dK/dV"], BLUE),
        at(740, 100, ["kernel", "kernels/registry.py", "kernels/verify.py", "kernels/adapters/"], GREEN),
        at(740, 250, ["merge", "accumulate.py, merge.py", "fused_merge.py on GPUs", "(out, lse) in fp32"], GREEN),
        line("M220 79 L260 119"),
        line("M220 199 L260 159"),
        line("M360 178 L360 250"),
        line("M460 289 L500 160"),
        text(474, 216, "calls", 11, GREY, "end"),
        line("M460 300 L500 300"),
        text(480, 318, "pieces", 11, GREY),
        line("M600 250 L600 178", both=True),
        text(610, 218, "K/V of a stage", 11, GREY, "start"),
        line("M700 139 L740 139"),
        text(720, 130, "tile", 11, GREY),
        line("M840 178 L840 250"),
        text(850, 218, "out, lse", 11, GREY, "start"),
        line("M740 276 L700 178"),
    ]
    return svg(960, 350, parts)


def loss_curve(data: dict[str, Any]) -> str:
    """The losses of the killed run over those of the undisturbed one, with the recovery marked."""
    killed, calm = ([float.fromhex(value) for value in data[name]] for name in ("killed", "undisturbed"))
    left, top, width, height = 60, 30, 720, 270
    low, high = 2.3, 6.0

    def x(step: float) -> float:
        return left + width * step / (len(calm) - 1)

    def y(loss: float) -> float:
        return top + height * (high - loss) / (high - low)

    def curve(losses: list[float]) -> str:
        return "M" + " L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in enumerate(losses))

    parts = [line_of_grid(left, y(loss), width, f"{loss:.0f}") for loss in (3, 4, 5, 6)]
    parts += [text(x(step), top + height + 20, str(step), 12, GREY) for step in range(0, len(calm), 10)]
    parts += [text(left + width / 2, top + height + 42, "step", 12, GREY), text(14, top + 6, "loss", 12, GREY, "start")]
    step = data["recovery"]["step"]
    parts += [
        f'<path d="M{x(step):.1f} {top} V{top + height}" stroke="{RED}" stroke-dasharray="4 3"/>',
        text(x(step) + 8, top + 18, data["recovery"]["cause"], 13, RED, "start"),
        text(x(step) + 8, top + 36, data["recovery"]["action"], 13, INK, "start"),
        f'<path d="{curve(calm)}" fill="none" stroke="#9ec9ff" stroke-width="6" stroke-linejoin="round"/>',
        f'<path d="{curve(killed)}" fill="none" stroke="{BLUE}" stroke-width="1.6" stroke-linejoin="round"/>',
    ]
    same = sum(one == other for one, other in zip(killed, calm, strict=True))
    for row, (color, stroke, words) in enumerate(
        [
            ("#9ec9ff", 6, "undisturbed run"),
            (BLUE, 1.6, f"run with the kill: {same} of {len(calm)} losses bit for bit equal"),
        ]
    ):
        here = top + 76 + 20 * row
        parts.append(f'<path d="M{x(step) + 8:.1f} {here - 4} h30" stroke="{color}" stroke-width="{stroke}"/>')
        parts.append(text(x(step) + 46, here, words, 12, INK, "start"))
    return svg(800, 355, parts)


def line_of_grid(left: float, y: float, width: float, label: str) -> str:
    rule = f'<path d="M{left} {y:.1f} h{width}" stroke="#d8dee4" stroke-width="1"/>'
    return rule + text(left - 10, y + 4, label, 12, GREY, "end")


def read_runs(killed: Path, undisturbed: Path) -> dict[str, Any]:
    """What `loss_curve` draws, from the summaries of two runs."""
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (killed, undisturbed))
    recovery = one["recoveries"][0]
    return {
        "killed": one["losses"],
        "undisturbed": other["losses"],
        "recovery": {
            "step": recovery["step"],
            "cause": recovery["cause"],
            "action": f"{recovery['action']} in {recovery['total_s']:.1f} s; no step lost",
        },
    }


def drawings() -> dict[str, str]:
    data = json.loads((HERE / "loss_curve.json").read_text(encoding="utf-8"))
    return {"architecture.svg": architecture(), "attention.svg": attention(), "loss_curve.svg": loss_curve(data)}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        found = read_runs(Path(sys.argv[1]), Path(sys.argv[2]))
        (HERE / "loss_curve.json").write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    for name, drawing in drawings().items():
        (HERE / name).write_text(drawing, encoding="utf-8")
