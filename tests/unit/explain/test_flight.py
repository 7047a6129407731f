"""Dumps of torch's flight recorder show which rank did not join which collective."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.explain.evidence import Ending, Evidence, Statement
from holdfast.explain.flight.dumps import find_dumps, read_dumps
from holdfast.explain.flight.judging import read_flight_of_attempt
from holdfast.explain.flight.plain_pickle import NotPlainError, read_plain_pickle
from holdfast.explain.judging import judge
from holdfast.supervise.launch.flight_dumps import flight_variables, keep_dumps

TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)


def entry(sequence: int, name: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """Return a collective as torch's FlightRecorder describes it, called at line 10 * sequence."""
    frames = [
        {"name": name, "filename": "/x/site-packages/torch/distributed/distributed_c10d.py"},
        {"name": "train", "filename": "/home/me/train.py", "line": 10 * sequence},
    ]
    return {
        "record_id": sequence,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "time_created_ns": 1000 * sequence,
        "frames": frames,
        "is_p2p": False,
        **more,
    }


def write(folder: Path, dumps: dict[int, list[dict[str, Any]]], ranks: str = "[0, 1, 2]") -> None:
    """Write one dump for each rank, as torch does."""
    groups = {
        "0": {"name": "0", "desc": "default_pg", "ranks": ranks},
        "1": {"name": "1", "desc": "undefined", "ranks": "[0, 2]"},
    }
    for rank, entries in dumps.items():
        values = {"version": "2.10", "pg_config": groups, "entries": entries}
        (folder / f"trace_rank_{rank}").write_bytes(pickle.dumps(values, protocol=2))


def explained(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(make_app("explain"), ["explain", str(path), "--json"])
    verdict: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == verdict["exit_code"]
    return verdict


PENDING: dict[str, Any] = {"state": "started", "retired": False}
IN_SUBGROUP = entry(1, process_group=("1", "undefined"), record_id=3, **PENDING)


@pytest.mark.parametrize(
    ("dumps", "rule", "rank", "line"),
    [
        pytest.param(
            {0: [entry(2), entry(3, **PENDING)], 1: [entry(2)], 2: [entry(2), entry(3, **PENDING)]},
            "H1660", 1, 20, id="a rank that did not enter it",
        ),
        pytest.param(
            {0: [entry(2), entry(3)], 1: [entry(2), entry(3, "broadcast")], 2: [entry(3)]},
            "H1661", 1, 30, id="another collective, and an older record that was overwritten",
        ),
        pytest.param(
            {0: [entry(2), entry(3)], 1: [entry(2)], 2: [entry(2), entry(3, input_sizes=[[4]])]},
            "H1661", None, 30, id="another shape, of two ranks",
        ),
        pytest.param(
            {0: [entry(2), IN_SUBGROUP], 1: [entry(2), entry(3, **PENDING)], 2: [entry(2)]},
            "H1660", 2, 20, id="the rank that waits in another group is not to blame",
        ),
        pytest.param(
            {rank: [entry(2), entry(3, **PENDING)] for rank in range(3)},
            "H1662", None, 30, id="all entered it",
        ),
        pytest.param(
            {rank: [entry(2), entry(3)] for rank in range(3)}, "H1663", None, None, id="no difference",
        ),
        pytest.param({1: [entry(2)]}, "H1663", None, None, id="a single dump"),
    ],
)  # fmt: skip
def test_the_first_collective_in_which_ranks_differ_is_named(
    tmp_path: Path, dumps: dict[int, list[dict[str, Any]]], rule: str, rank: int, line: int
) -> None:
    """The rank is named only if it is alone, and the line is that of its own newest collective."""
    write(tmp_path, dumps)

    verdict = explained(tmp_path)

    assert (verdict["cause"], verdict["rank"]) == (rule, rank)
    where = f"/home/me/train.py:{line} in train" if line else ""
    assert verdict["where"] == where
    assert verdict == explained(tmp_path / "trace_rank_1"), "one file stands for those beside it"


def test_a_rank_without_a_dump_is_said_to_be_unknown(tmp_path: Path) -> None:
    """Nothing is claimed about it, not even that it is missing."""
    write(tmp_path, {0: [entry(2, **PENDING)], 1: [entry(2, **PENDING)]})

    verdict = explained(tmp_path)

    assert (verdict["cause"], verdict["rank"]) == ("H1662", None)
    assert "no dump of rank 2" in verdict["summary"]


def test_json_is_read_where_there_is_no_pickle(tmp_path: Path) -> None:
    """It says the same without the lines."""
    write(tmp_path, {0: [entry(2), entry(3)], 1: [entry(2)], 2: [entry(2), entry(3)]})
    pickled = explained(tmp_path)
    for file in list(tmp_path.iterdir()):
        values = pickle.loads(file.read_bytes())
        file.with_name(f"{file.name}.json").write_text(json.dumps(values))
        file.unlink()

    assert explained(tmp_path)["cause"] == pickled["cause"] == "H1660"


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps(_Harmful(), protocol=2), id="a call"),
        pytest.param(pickle.dumps({"a": {1, 2}}, protocol=2), id="a class"),
        pytest.param(pickle.dumps({"a": [1, 2]}, protocol=2)[:-3], id="truncated"),
        pytest.param(b"\x80\x02" + b")" + b"\x85" * 1_000_000 + b"}" + b"\x8c\x01a" + b"s.", id="deep"),
        pytest.param(b"\x80\x02})N" + b"s.", id="a tuple as a key"),
        pytest.param(b"\x80\x02h\x07.", id="a value that is not there"),
        pytest.param(b"\x80\x02.", id="nothing"),
        pytest.param(b"", id="empty"),
    ],
)  # fmt: skip
def test_a_pickle_that_holds_more_than_plain_values_is_refused(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code runs, and the other dumps are read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotPlainError):
        read_plain_pickle(data)

    write(tmp_path, {0: [entry(2), entry(3)], 1: [entry(2)]}, ranks="[0, 1, 2]")
    (tmp_path / "trace_rank_2").write_bytes(data)
    dumps, problems = read_dumps(find_dumps(tmp_path))
    assert [dump.rank for dump in dumps] == [0, 1]
    assert len(problems) == bool(data)
    assert not (tmp_path / "harmed").exists()


def test_a_timeout_in_a_run_is_explained_by_its_dumps(tmp_path: Path) -> None:
    """The log only says that a rank waited; the dumps say for whom, and where that rank went."""
    place = flight_variables({}, tmp_path, 4)["TORCH_FR_DUMP_TEMP_FILE"]
    write(tmp_path, {0: [entry(2), entry(3)], 1: [entry(2)], 2: [entry(2), entry(3)]})
    for rank in range(3):
        (tmp_path / f"trace_rank_{rank}").rename(f"{place}{rank}")
    flight, problems = read_flight_of_attempt(tmp_path, 4)
    assert problems == []
    assert read_flight_of_attempt(tmp_path, 3) == (None, [])

    statement = Statement(
        text=TIMEOUT, source="output.log:1", exception="DistBackendError", kind="exception", rank=0
    )
    evidence = Evidence(statements=(statement,), endings=(Ending(status=1),), flight=flight)
    verdict = judge(evidence)
    assert (verdict.cause, verdict.rank) == ("H1660", 1)
    assert verdict.where == "/home/me/train.py:20 in train"
    assert judge(Evidence(statements=(statement,), endings=(Ending(status=1),))).cause == "H921"


def test_dumps_at_a_place_of_the_user_s_own_are_copied(tmp_path: Path) -> None:
    """Those of an earlier run at the same place are not."""
    place = tmp_path / "own"
    place.mkdir()
    write(place, {0: [entry(2)], 1: [entry(2)]})
    os.utime(place / "trace_rank_1", (1.0, 1.0))
    environment = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(place / "trace_rank_")}
    assert flight_variables(environment, tmp_path, 0) == {}

    keep_dumps(environment, tmp_path, 0, since=time.time() - 1000.0)

    assert [file.name for file in (tmp_path / "flight").iterdir()] == ["0-rank_0"]


REAL = """
import sys
import torch.distributed as dist
import torch._C._distributed_c10d as recorder
import torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
dist.barrier()
open(sys.argv[1] + "0", "wb").write(recorder._dump_fr_trace())
open(sys.argv[1] + "0.json", "wb").write(recorder._dump_fr_trace_json())
"""


@pytest.mark.slow
def test_what_torch_itself_writes_is_read(tmp_path: Path) -> None:
    """Its pickle has only plain values, and the same collectives as its JSON."""
    subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path / "rank_")],
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
        check=True,
    )
    pickled = tmp_path / "rank_0"
    values = read_plain_pickle(pickled.read_bytes())
    assert values == pickle.loads(pickled.read_bytes())

    (dump,), _ = read_dumps([pickled])
    (from_json,), _ = read_dumps([tmp_path / "rank_0.json"])
    assert [call.name for call in dump.calls] == ["all_reduce", "barrier"]
    assert [(call.name, call.sequence) for call in from_json.calls] == [
        ("all_reduce", 1),
        ("barrier", 2),
    ]
    assert dump.calls[0].frames[0].function == "<module>"
