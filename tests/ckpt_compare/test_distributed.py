"""The measuring shared out over processes: the same result, bit for bit, and one voice."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

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


def test_a_task_can_travel_to_another_machine(files):
    tensor = open_checkpoint(files[0]).tensors["layers.3.w"]
    assert (pickle.loads(pickle.dumps(tensor)).pieces[0].source.load() == tensor.pieces[0].source.load()).all()


@pytest.mark.slow
def test_ray_gives_the_result_of_one_process(files, cluster):
    a, b = map(open_checkpoint, files)
    assert compare(a, b, runner=run_on_ray).rows == compare(a, b).rows
