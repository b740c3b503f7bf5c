"""The measuring shared out over processes: the same result, bit for bit, and one voice."""

import os
import pickle
import select
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from torch.distributed import TCPStore

from tests.distributed.launch import free_port
from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.distributed import run_on_ray
from trainprobe.ckpt_compare.formats import open_checkpoint

RNG = np.random.default_rng(0)


@pytest.fixture
def files(tmp_path):
    held = {f"layers.{i}.w": RNG.standard_normal((40, 30)).astype(np.float32) for i in range(7)}
    other = {k: v.copy() for k, v in held.items()}
    other["layers.4.w"] += RNG.standard_normal((40, 30)).astype(np.float32)
    other["layers.5.w"][3, 3] = np.nan
    for name, content in (("a", held), ("b", other)):
        save_file(content, tmp_path / f"{name}.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


@pytest.mark.parametrize(("size", "at_once"), [(2, 1000), (3, 2)])
def test_a_world_gives_the_result_of_one_process_and_rank_zero_speaks(files, tmp_path, size, at_once):
    script = f"import sys, trainprobe.ckpt_compare.compare as c; c.AT_ONCE = {at_once}; "
    script += "from trainprobe.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "ckpt-compare", *map(str, files), "--json"]
    subprocess.run([*command, str(tmp_path / "one.json")], check=False, timeout=60, capture_output=True)
    port = str(free_port())
    ranks = []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen([*command, str(tmp_path / f"{rank}.json")], env=env, stdout=subprocess.PIPE, text=True))
    said = [p.communicate(timeout=120)[0] for p in ranks]
    assert [p.returncode for p in ranks] == [2] * size
    assert [bool(s) for s in said] == [True] + [False] * (size - 1)
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "one.json").read_bytes()
    assert not (tmp_path / "1.json").exists()


BEGIN_TOGETHER = """
import os, pathlib, signal, sys, time, torch.distributed, trainprobe.ckpt_compare.command
import trainprobe.ckpt_compare.distributed as d
from trainprobe.cli import main
meet, rank, measure = pathlib.Path(sys.argv[1]), os.environ["RANK"], d.run
(meet / f"ready{rank}").touch()
while len([*meet.glob("ready*")]) < 2:
    time.sleep(0.01)
"""
COMPARE = "sys.exit(main(['ckpt-compare', *sys.argv[2:]]))"
SLOW = "d.run = lambda *given: (rank == '1' and time.sleep(5), measure(*given))[1]\n"
STOPPED = "d.run = lambda *given: (rank == '{}' and os.kill(os.getpid(), signal.SIGSTOP), measure(*given))[1]\n"


@pytest.fixture
def two_ranks(tmp_path):
    """Start two ranks that compare what is given, and kill what is left of them."""
    started = []

    def start(scripts, *arguments, **environment):
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
        for rank, script in enumerate(scripts):
            command = [sys.executable, "-c", script, str(tmp_path), *map(str, arguments)]
            env = {**os.environ, **world, "RANK": str(rank)}
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_rank_that_ended_before_it_joined_is_named(files, two_ranks):
    ranks = two_ranks(
        ["import sys; " + COMPARE.replace("main", "__import__('trainprobe.cli').cli.main"), "pass"],
        files[0],
        files[0],
        "--wait",
        "1",
    )
    said = ranks[0].communicate(timeout=60)[0]
    assert ranks[0].returncode == 3
    assert "rank 1 did not join for 1 s (--wait 1)" in said
    assert "identical" not in said


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_is_named_by_the_other(files, two_ranks, stopped):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # as torchrun keeps it
    script = BEGIN_TOGETHER + STOPPED.format(stopped) + COMPARE
    other = two_ranks([script] * 2, files[0], files[0], "--wait", "2", **kept)[1 - stopped]
    said = other.communicate(timeout=60)[0]
    assert other.returncode == 3
    assert f"rank {stopped} was silent for 2 s (--wait 2)" in said
    assert "identical" not in said


def test_a_stopped_rank_zero_that_keeps_the_store_is_noticed(files, two_ranks):
    other = two_ranks([BEGIN_TOGETHER + STOPPED.format(0) + COMPARE] * 2, files[0], files[0], "--wait", "1")[1]
    said = other.communicate(timeout=60)[0]
    assert other.returncode == 3
    assert "was silent for 2 s" in said


def test_a_rank_that_works_longer_than_the_limit_is_waited_for(files, two_ranks):
    ranks = two_ranks([BEGIN_TOGETHER + SLOW + COMPARE] * 2, *files, "--wait", "2")
    said = ranks[0].communicate(timeout=60)[0]
    assert [p.wait(timeout=60) for p in ranks] == [2, 2]
    assert "differ" in said


def test_a_rank_that_gives_up_says_why_at_once(files, two_ranks):
    lost = "rank == '1' and sys.argv.__setitem__(2, 'nowhere.safetensors')\n"
    ranks = two_ranks([BEGIN_TOGETHER + lost + COMPARE] * 2, files[0], files[0], "--wait", "600")
    said = ranks[0].communicate(timeout=60)[0]
    assert ranks[0].returncode == 3
    assert "rank 1 gave up: nowhere.safetensors" in said


def test_rank_zero_has_spoken_before_another_ends(files, two_ranks):
    late = (
        "import trainprobe.ckpt_compare.report as r; show = r.show; r.show = lambda *a, **k: (time.sleep(1), show(*a, **k))\n"
    )
    ranks = two_ranks([BEGIN_TOGETHER + late + COMPARE] * 2, *files)
    ranks[1].communicate(timeout=60)
    ready = select.select([ranks[0].stdout], [], [], 0)[0]
    assert ready, "torchrun would stop rank 0 now"
    assert "differ" in os.read(ranks[0].stdout.fileno(), 1 << 16).decode()


def test_a_task_can_travel_to_another_machine(files):
    tensor = open_checkpoint(files[0]).tensors["layers.3.w"]
    assert (pickle.loads(pickle.dumps(tensor)).pieces[0].source.load() == tensor.pieces[0].source.load()).all()


@pytest.mark.slow
def test_ray_gives_the_result_of_one_process(files, cluster):
    a, b = map(open_checkpoint, files)
    assert compare(a, b, runner=run_on_ray).rows == compare(a, b).rows
