"""Two ranks on gloo, started once by torch's launcher: messages, waits, replicas, and steps that every rank aborts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelining.conftest import MICROBATCHES
from tests.pipelining.two_ranks import PROGRAMS

REPLAYS = [name for name in PROGRAMS if name.endswith(("lazy", "on wait", "on any wait"))]
RAISE = [name for name in PROGRAMS if "all raise" in name]
REPLICAS = [name for name in PROGRAMS if "data parallel" in name]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each program returned, by rank."""
    folder = tmp_path_factory.mktemp("two_ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*launch, "-m", "tests.pipelining.two_ranks", str(folder)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("name", REPLAYS)
def test_one_replay_and_the_gradients_of_torchs_own_stage(results, name):
    """Rule 26: on both ranks, in every step."""
    for rank in results:
        assert rank[name] == {"same": [True] * 3, "replays": [MICROBATCHES]}


# By schedule and rank: replays that ran before the wait for the gradient, and within backward. A rank waits for no
# gradient of its last stage, nor for one that its neighbour stage on the same rank computes.
PLACED = {
    "1F1B on the runtime": [(8, 0), (0, 8)],
    "LoopedBFS": [(16, 0), (8, 8)],
    "Interleaved1F1B": [(16, 0), (8, 8)],
    "InterleavedZeroBubble": [(16, 0), (8, 8)],
    "ZBV": [(8, 8), (8, 8)],
    "DualPipeV": [(8, 8), (8, 8)],
}


@pytest.mark.parametrize("name", PLACED)
def test_replays_run_before_the_rank_waits(results, name):
    """Rule 26: the receive is posted, the replay runs, and only then the rank blocks."""
    for rank, (outside, inside) in zip(results, PLACED[name], strict=True):
        assert rank[f"{name}, placed"] == {"outside": outside, "inside": inside}


@pytest.mark.parametrize("name", RAISE)
def test_the_steps_after_one_that_every_rank_aborted(results, name):
    """Rule 27: messages in flight are brought to their end, and gradients are right."""
    for rank in results:
        assert rank[name] == {"same": [True] * 3, "notes": []}


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_reduce_after_the_last_dw(results, name):
    """Rule 25: two replicas give the gradients of one process on the whole batch; torch's split leaves them apart."""
    for rank in results:
        assert rank[name] == {"close": True}


def test_a_peer_that_did_not_raise_is_named(results):
    """Rule 27: the error says what must be rebuilt, on the rank that raised and on the one that gave up waiting."""
    for rank in results:
        (note,) = rank["a peer that lives"]["notes"]
        assert "rebuild the process group" in note
