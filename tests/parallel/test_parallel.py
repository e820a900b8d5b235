"""Data, tensor and pipeline parallel training on ranks of gloo, started by torch's launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.four_ranks import PREFIRE, SCHEDULES
from tests.parallel.two_ranks import DDP, ENGINES, MODES, N_BLOCKS, PROGRAMS, STEPS, WHERE
from tests.pipelining.conftest import MICROBATCHES
from tests.support import rows
from tests.support.matrix import refused
from tests.support.page import works

ONCE_AGAIN = [[2] * N_BLOCKS] * STEPS  # forward and one replay


def launched(folder, module, n_ranks):
    """Run a module on ranks of its own; return what they said."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*launch, "-m", module, str(folder)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each program returned, by rank."""
    folder = tmp_path_factory.mktemp("two_ranks")
    said = launched(folder, "tests.parallel.two_ranks", 2)
    found = [json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert list(found[0]) == list(found[1]) == list(PROGRAMS)
    return [{**ranks, "said": said} for ranks in found]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_sharded_blocks(results, support, engine, where, reshard, mode):
    """Rule 31: gradients of one process; all but a bare prefire gathers and orders as without a prefire."""
    for rank in results:
        found = rank[f"{engine}: FSDP2 {where}, reshard {reshard}, {mode}"]
        assert found["same"] == [True] * STEPS
        assert found["runs"] == ONCE_AGAIN
        if (where, mode) == ("around", "bare"):  # what a carrier is for
            assert min(found["gathered"]) > (2 if reshard else 1) * N_BLOCKS
            assert found["order"] == [2 * N_BLOCKS] * STEPS
        else:
            assert found["gathered"] == [(2 if reshard else 1) * N_BLOCKS] * STEPS
            assert found["order"] == [N_BLOCKS] * STEPS
        only_shards = where == "inside" and reshard
        assert found["early"] == [[1 if mode == "lazy" or only_shards else 2] * N_BLOCKS] * STEPS
    but = "replayed when backward asks: the prefire finds only shards, and says so"
    cell = works(found["runs"][0][0] - 1, but if only_shards and mode != "lazy" else "")
    support(rows.sharded(where, mode, reshard=reshard), engine, cell)


def test_a_prefire_that_finds_shards_says_so(results):
    """Rule 31: and names the block; it stays a lazy replay."""
    for index in range(N_BLOCKS):
        assert f"blocks.{index} (Block.forward): not replayed ahead of backward" in results[0]["said"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", DDP)
def test_replicas(results, support, engine, option):
    """Rule 31: hooks run once for each parameter and backward; one replay for each forward."""
    n_backwards = 2 if option == "no_sync" else 1
    for rank in results:
        found = rank[f"{engine}: DDP {option}"]
        if (engine, option) == (
            "reentrant",
            "unused",
        ):  # DDP looks for unused parameters in a graph that is not there yet
            assert "has been marked as ready twice" in found["failed"]
            raised = next(line for line in found["failed"].splitlines() if line.startswith("RuntimeError: "))
            cell = refused(raised, by="torch")
            continue
        assert found["same"] == [True] * STEPS
        assert found["hooked"] == [4 * N_BLOCKS * n_backwards] * STEPS
        assert found["runs"] == [[2 * n_backwards] * N_BLOCKS] * STEPS
        cell = works(found["runs"][0][0] // n_backwards - 1)
    support(rows.replicated(option), engine, cell)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_split_layers(results, support, engine, dropout):
    """Rule 31: bit-equal to no checkpoint, dropout included; early stop drops every collective of the replay.

    The reentrant engine needs the outputs of its replays, and so their collectives.
    """
    for rank in results:
        found = rank[f"{engine}: tensor parallel, dropout {dropout}"]
        assert found["same"]
        assert found.get("whole", True)
        assert found["checkpoint runs"] == [2] * N_BLOCKS
        forward, backward = found["plain"]
        assert forward > 0
        assert found["checkpoint"] == [forward, backward + (0 if engine == "hooks" else forward)]
    support(rows.split(dropout), engine, works(found["checkpoint runs"][0] - 1))


def test_without_early_stop_the_collectives_of_forward_run_again(results):
    """Rule 31: so that the test above counts something."""
    for rank in results:
        found = rank["hooks: tensor parallel, the whole function"]
        forward, backward = found["plain"]
        assert found["checkpoint"] == [forward, backward + forward]


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_on_a_sharded_tensor(results, support, engine):
    """Rule 31: the replay draws what forward drew."""
    for rank in results:
        assert rank[f"{engine}: random placement"] == {"same": True, "dropped": True, "runs": 2}
    support(rows.DROPOUT_ON_SHARDS, engine, works(rank[f"{engine}: random placement"]["runs"] - 1))


@pytest.fixture(scope="module")
def sharded_pipelines(tmp_path_factory):
    """What each of four ranks returned."""
    folder = tmp_path_factory.mktemp("four_ranks")
    launched(folder, "tests.parallel.four_ranks", 4)
    return [json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("prefire", PREFIRE)
def test_sharded_stages_of_a_pipeline(sharded_pipelines, support, engine, name, prefire):
    """Rules 26 and 31: gradients of one process on the whole batch, and one replay per block and micro-batch."""
    for rank in sharded_pipelines:
        found = rank[f"{engine}: {name}, {prefire}"]
        assert found["same"] == [True, True]
        assert found["runs"][-1] == [2 * MICROBATCHES]
    support(rows.on_sharded_stages(name, prefire), engine, works(found["runs"][-1][0] // MICROBATCHES - 1))
