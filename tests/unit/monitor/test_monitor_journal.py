"""The journal survives a crash in the middle of a line and hides no other damage."""

from __future__ import annotations

import hashlib
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.errors import JournalDamaged, OtherFormat, StorageFailed
from elastic_ring.monitor import journal as journal_module
from elastic_ring.monitor.journal import Flaw, Journal, Link, chained, read
from elastic_ring.monitor.json_files import json_bytes, parse_json
from tests.journals import journal_bytes, salvage

RECORDS = [{"now": 0.5, "event": {"type": "Tick", "text": "a\nb\u00e9"}}, {"commands": []}, {"n": 3}]


def write(path: Path, records: list[dict]) -> None:
    with Journal(path) as journal:
        for record in records:
            journal.append(record)


def test_what_was_appended_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS[:2])
    write(path, RECORDS[2:])
    assert list(read(path)) == RECORDS
    assert path.read_bytes().count(b"\n") == 3


def test_a_missing_journal_is_an_empty_one_and_the_constructor_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path)
    assert list(read(path)) == []
    assert not path.exists()


def test_floats_that_are_not_finite_come_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, [{"values": [math.inf, -math.inf, math.nan, 0.1]}])
    (values,) = [record["values"] for record in read(path)]
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])
    assert values[3].hex() == (0.1).hex()


def test_a_line_torn_at_any_byte_is_ignored_and_cut_off_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for kept in range(len(last)):
        path.write_bytes(whole[: len(whole) - len(last) + kept])
        assert list(read(path)) == RECORDS[:2], kept
        write(path, [{"n": 4}])
        assert list(read(path)) == [*RECORDS[:2], {"n": 4}], kept


def test_a_hole_that_a_power_cut_left_at_the_end_is_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    with path.open("ab") as file:
        file.write(b'{"n":' + b"\0" * 30 + b"}\n")
    assert list(read(path)) == RECORDS
    write(path, [{"n": 4}])
    assert list(read(path)) == [*RECORDS, {"n": 4}]


@pytest.mark.parametrize("damage", [b'{"now":', b"[1, 2]", b"", b"\0\0\0", b"null"])
def test_damage_in_the_middle_is_named_with_its_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, lines[2], b""]))
    with pytest.raises(JournalDamaged, match="line 2 of") as caught:
        list(read(path))
    assert caught.value.facts["line"] == 2
    with pytest.raises(JournalDamaged, match="line 2 of"):
        Journal(path).open()


def test_any_wrong_byte_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    data = path.read_bytes()
    for index in range(len(data) - 1):  # without its end the last line is a torn one
        path.write_bytes(data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])
        with pytest.raises(JournalDamaged):
            list(read(path))


def two_writers(path: Path) -> list[bytes]:
    """The lines of a coordinator, and of its successor after the third; the first one goes on for one more line."""
    first, second = Journal(path).open(), Journal(path)
    for n in range(3):
        first.append({"n": n})
    second.open()
    second.append({"same": 3})
    first.append({"same": 3})
    second.append({"n": 4})
    second.append({"n": 5})
    return path.read_bytes().splitlines(keepends=True)


def test_a_replaced_coordinator_and_its_successor_write_one_journal(tmp_path: Path) -> None:
    lines = two_writers(tmp_path / "journal.jsonl")
    third = [{"n": n} for n in range(6, 8)]
    write(tmp_path / "journal.jsonl", third)
    assert list(read(tmp_path / "journal.jsonl"))[len(lines) :] == third


@pytest.mark.parametrize("num_writers", [1, 2])
def test_a_line_deleted_doubled_or_moved_is_named(tmp_path: Path, num_writers: int) -> None:
    """The last line of a writer can be deleted unseen."""
    path = tmp_path / "journal.jsonl"
    if num_writers == 2:
        lines, ends = two_writers(path), {4, 6}
    else:
        lines, ends = journal_bytes([{"n": n} for n in range(7)]).splitlines(keepends=True), {6}
    edits = {("deleted", k): lines[:k] + lines[k + 1 :] for k in range(len(lines)) if k not in ends}
    edits |= {("doubled", k): lines[: k + 1] + lines[k:] for k in range(len(lines))}
    edits |= {
        ("moved", k): [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]
        for k in range(len(lines) - 1)
        if num_writers == 1 or k not in (3, 4)  # lines of two writers, each in its order
    }
    for edit, left in edits.items():
        path.write_bytes(b"".join(left))
        with pytest.raises(JournalDamaged, match="does not follow the line before it"):
            list(read(path))
        records, flaws = salvage(path.read_bytes())
        assert len(records) == len(left), edit
        assert flaws, edit


def test_a_hole_in_the_middle_is_one_flaw() -> None:
    lines = journal_bytes([{"n": n} for n in range(4)]).splitlines(keepends=True)
    assert salvage(lines[0] + b"\0" * 9 + b"\n" + lines[2] + lines[3])[1] == [Flaw(2, "is damaged")]


def test_one_damaged_line_is_one_flaw(tmp_path: Path) -> None:
    lines = journal_bytes([{"n": n} for n in range(4)]).splitlines(keepends=True)
    assert salvage(lines[0] + b"?\n" + lines[2] + lines[3]) == (
        [{"n": 0}, {"n": 2}, {"n": 3}],
        [Flaw(2, "is damaged")],
    )


@pytest.mark.parametrize(
    "line", [b'{"note":"term","term":1,"num_lines":0,"crc":"c0b8bf67"}\n', chained({"n": 1}, Link())[0]]
)
def test_a_journal_of_another_format_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line)
    if b"seq" in line:
        monkeypatch.setattr(journal_module, "FORMAT", 3)
    message = "has format 1, .* reads format 2" if b"seq" not in line else "has format 2, .* reads format 3"
    with pytest.raises(OtherFormat, match=rf"journal\.jsonl {message}: go on with the version that wrote it"):
        list(read(path))
    with pytest.raises(OtherFormat):
        salvage(line)


def test_a_whole_last_line_that_is_no_record_is_damage(tmp_path: Path) -> None:
    """One write made it, so no crash explains it; dropping it would forget a command that has left."""
    path = tmp_path / "journal.jsonl"
    write(path, RECORDS)
    path.write_bytes(path.read_bytes()[:-3] + b"#}\n")
    with pytest.raises(JournalDamaged, match="line 3 of"):
        list(read(path))


def test_a_reader_beside_a_live_writer_sees_only_whole_lines(tmp_path: Path) -> None:
    """The other half of the line arrives while the reader stands at it."""
    path = tmp_path / "journal.jsonl"
    text = journal_bytes([{"n": 1}, {"n": 2}, {"n": 3}])
    cut = text.index(b"\n") + 6
    path.write_bytes(text[:cut])
    records = read(path)
    assert next(records) == {"n": 1}
    with path.open("ab") as file:
        file.write(text[cut:])
    assert list(records) in ([], [{"n": 2}, {"n": 3}])
    assert list(read(path)) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_full_disk_is_an_error_and_leaves_a_journal_that_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    script = (
        "import resource, signal, sys\n"
        "from elastic_ring.errors import StorageFailed\n"
        "from elastic_ring.monitor.journal import Journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "journal = Journal(sys.argv[1]).open()\n"
        "journal.append({'n': 1})\n"
        "try:\n"
        "    journal.append({'text': 'x' * 200})\n"
        "except StorageFailed as error:\n"
        "    print(error)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script, path], check=True, capture_output=True, text=True)
    assert "File too large" in done.stdout
    assert path.stat().st_size == 100
    write(path, [{"n": 2}])
    assert list(read(path)) == [{"n": 1}, {"n": 2}]


def test_a_write_error_is_of_the_one_tree(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl").open()
    assert journal._fd is not None
    reading = os.open(journal.path, os.O_RDONLY)
    os.dup2(reading, journal._fd)
    os.close(reading)
    with pytest.raises(StorageFailed, match="cannot write the journal"):
        journal.append({"n": 1})


WRITER = (
    "import os, sys\nfrom elastic_ring.monitor.journal import Journal\n"
    "with Journal(sys.argv[1], durable=False) as journal:\n"
    "    parent = os.getppid()\n    print('open', flush=True)\n    sys.stdin.readline()\n    n = 0\n"
    "    while (n < 500 or not os.path.exists(sys.argv[1] + '.enough')) and os.getppid() == parent:\n"
    "        journal.append({'who': sys.argv[2], 'n': n, 'pad': 'x' * 300})\n        n += 1\n"
)


def begin_writing(path: Path, names: str) -> list[subprocess.Popen[str]]:
    """Processes that have the journal open, and then write at once."""
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen([*command, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for who in names
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    return writers


def numbers(path: Path, who: str) -> list[int]:
    return [record["n"] for record in read(path) if record["who"] == who]


def test_lines_of_two_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writers = begin_writing(path, "ab")
    Path(f"{path}.enough").touch()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    for who in "ab":  # at least so many: one that is quick goes on until it sees that it is enough
        found = numbers(path, who)
        assert len(found) >= 500
        assert found == list(range(len(found)))


def test_whoever_opens_it_cuts_nothing_off_that_another_is_just_writing(tmp_path: Path) -> None:
    """As the successor of a coordinator that has not heard of it."""
    path = tmp_path / "journal.jsonl"
    (writer,) = begin_writing(path, "a")
    for _ in range(5):
        Journal(path, durable=False).open().close()
    assert writer.poll() is None
    Path(f"{path}.enough").touch()
    writer.communicate(timeout=60)
    assert writer.returncode == 0
    found = numbers(path, "a")
    assert found == list(range(len(found)))


def test_lines_between_the_last_look_and_the_cut_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(journal_bytes(RECORDS[:1]))
    end_of, data = journal_module._end_of, journal_bytes([RECORDS[0], {"n": 1}, {"n": 2}])
    cut = len(data) - 9

    def look(*arguments: Any) -> tuple[int, Link]:
        end = end_of(*arguments)
        with path.open("ab") as other:
            other.write(data[path.stat().st_size : cut])
        return end

    monkeypatch.setattr(journal_module, "_end_of", look)
    Journal(path).open().close()
    with path.open("ab") as other:
        other.write(data[cut:])
    assert list(read(path)) == [RECORDS[0], {"n": 1}, {"n": 2}]


def test_a_half_line_whose_other_half_comes_is_not_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(journal_bytes(RECORDS[:1]))
    line = journal_bytes([RECORDS[0], {"n": 42}])[path.stat().st_size :]
    with path.open("ab") as other:
        other.write(line[:5])
    pauses = iter([line[5:7], line[7:8], line[8:]])

    def pause(seconds: float) -> None:
        with path.open("ab") as other:
            other.write(next(pauses))

    monkeypatch.setattr(journal_module.time, "sleep", pause)
    write(path, [{"n": 5}])
    assert list(read(path)) == [RECORDS[0], {"n": 42}, {"n": 5}]


def test_a_json_file_of_another_format_is_no_damage() -> None:
    content = {"run": "r"}
    assert parse_json(json_bytes(content), "status.json") == content
    of_format_1 = json_bytes(content).replace(b'\n "format": 2,', b"")
    digest = hashlib.sha256(re.sub(rb"[0-9a-f]{64}", b"0" * 64, of_format_1)).hexdigest().encode()
    with pytest.raises(OtherFormat, match=r"status\.json has format 1, .* reads format 2"):
        parse_json(re.sub(rb"[0-9a-f]{64}", digest, of_format_1), "status.json")


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def put_an_older_copy_there(path: Path) -> None:
    copy = path.with_suffix(".copy")
    copy.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    copy.replace(path)


@pytest.mark.parametrize("cut", [cut_in_half, empty, put_an_older_copy_there])
def test_its_writer_sees_that_it_was_cut_and_the_next_line_shows_it_to_every_reader(
    tmp_path: Path, cut: Callable[[Path], None]
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
        assert (journal.is_cut(), journal.sync()) == (False, 3)
        cut(path)
        assert journal.is_cut()
        journal.append({"note": "cut"})
        assert not journal.is_cut(), "it is told once"
    with pytest.raises(JournalDamaged):
        list(read(path))


def test_a_journal_that_is_away_with_its_folder_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    path.parent.mkdir()
    with Journal(path) as journal:
        journal.append({"n": 1})
        path.parent.rename(tmp_path / "elsewhere")
        assert not journal.is_cut()
        path.parent.mkdir()
        assert not journal.is_cut()
