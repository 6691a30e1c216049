"""How long a driver and the nodes live without the head of the cluster, and who is told of it."""

from __future__ import annotations

import os
import socket

import pytest

from elastic_ring.runtime.driver.ray_session import OUTLAST_S, is_listening, outlast_head
from elastic_ring.runtime.ray_head import RECONNECT, is_kept, reconnect_s, warn_if_shorter


def test_ray_keeps_a_driver_for_longer_than_it_waits_itself_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for lease_s, expected_s in ((300.0, 300 + OUTLAST_S), (5.0, 60 + OUTLAST_S)):
        monkeypatch.setenv(RECONNECT, "")
        monkeypatch.delenv(RECONNECT)
        outlast_head(lease_s)
        assert reconnect_s(os.environ) == expected_s
    monkeypatch.setenv(RECONNECT, "40")
    outlast_head(300.0)
    assert reconnect_s(os.environ) == 40


def test_a_process_that_ray_ends_before_the_lease_is_over_is_told_with_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warn_if_shorter("this driver", 60.0, 60.0) == ""
    told = warn_if_shorter("all processes of node ab", 60.0, 299.5)
    assert "may be away for 60 s only, not for timeouts.lease_s=299.5" in told
    assert f"ends all processes of node ab. Set {RECONNECT}=300 or more" in told
    assert caplog.messages == [told]


def test_a_wrong_value_names_its_variable() -> None:
    assert reconnect_s({}) == 60
    with pytest.raises(ValueError, match=f"{RECONNECT}='soon'"):
        reconnect_s({RECONNECT: "soon"})


def test_a_head_with_rocksdb_or_redis_keeps_its_state() -> None:
    assert is_kept({"RAY_gcs_storage": "rocksdb"})
    assert is_kept({"RAY_REDIS_ADDRESS": "10.0.0.1:6379"})
    assert not is_kept({})
    assert not is_kept({"RAY_gcs_storage": "memory", "RAY_REDIS_ADDRESS": ""})


def test_a_head_counts_as_away_when_nobody_listens_at_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert is_listening(address)
    assert not is_listening(address)
