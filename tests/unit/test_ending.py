"""While the last records are written the coordinator goes on answering: silence would cost it its life."""

from __future__ import annotations

import queue
import threading
from typing import Any

from elastic_ring.runtime.ending import aside


def test_beats_are_echoed_and_faults_refused_while_the_end_is_being_written() -> None:
    mail: queue.Queue[tuple[str, Any, dict[str, Any]]] = queue.Queue()
    answer: queue.Queue[bool] = queue.Queue()
    echoed = threading.Event()

    def work() -> dict[str, Any]:
        mail.put(("fault", 0, {"answer": answer}))
        mail.put(("beat", "node", {}))
        assert echoed.wait(30.0), "the end could not be written while nobody echoed"
        return {"error": ""}

    nodes: list[str] = []

    def echo(node: str) -> None:
        nodes.append(node)
        echoed.set()

    assert aside(work, mail, echo) == {"error": ""}
    assert nodes == ["node"]
    assert answer.get(timeout=30.0) is False
