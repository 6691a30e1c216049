"""Every causal model of the installed transformers trains as it does there, or is refused by name: none in silence."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from tests.unit.integrations.model_fuzz import RECORD, kind_of, outcomes, types


@pytest.mark.slow
@pytest.mark.parametrize("num_turned", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", types())
def test_a_model_of_any_type_is_equal_or_refused_by_name_as_it_is_and_with_its_switches_turned(
    kind: str, num_turned: int
) -> None:
    results = [*outcomes(kind, num_turned)]
    assert kind_of(results[0][1]) == json.loads(RECORD.read_text())[kind], "write the record anew, then docs/tables.py"
