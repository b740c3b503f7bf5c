"""The command as a user runs it: exit codes, files, and what stands in the first line."""

import csv
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.ckpt_compare import formats
from trainprobe.cli import main

RNG = np.random.default_rng(0)


def model(layers=3):
    found = {"model.embed_tokens.weight": RNG.standard_normal((16, 8)), "model.norm.weight": np.ones(8)}
    for i in range(layers):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            found[f"model.layers.{i}.{part}.weight"] = RNG.standard_normal((8, 8))
    return {k: v.astype(np.float32) for k, v in found.items()}


@pytest.fixture
def files(tmp_path):
    """Two files of the same model, the second one to be changed by a function."""
    held = model()

    def write(edit=lambda b: None):
        other = {k: v.copy() for k, v in held.items()}
        edit(other)
        for name, content in (("a", held), ("b", other)):
            save_file(content, tmp_path / f"{name}.safetensors")
        return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")

    return write


def nudge(b):
    b["model.layers.1.mlp.down_proj.weight"][2, 3] += 1


def test_the_exit_code_is_zero_for_the_same_model(files, capsys):
    assert main(["ckpt-compare", *files()]) == 0
    assert capsys.readouterr().out.startswith("identical: 11 weights tensors (")


def test_the_first_line_names_what_differs_and_the_exit_code_is_two(files, capsys):
    assert main(["ckpt-compare", *files(nudge)]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("differ: 1 of 11 tensors; worst is layers.1.mlp.fc2.weight: relative error")
    assert "[2, 3]" in first


def test_rows_behind_the_vocabulary_are_missing_unless_the_user_says_that_they_are_padding(files, capsys):
    def longer(b):
        b["model.embed_tokens.weight"] = np.concatenate([b["model.embed_tokens.weight"], np.ones((4, 8), np.float32)])

    assert main(["ckpt-compare", *files(longer)]) == 3
    assert "rows 16 to 19 are only in B" in capsys.readouterr().out
    assert main(["ckpt-compare", *files(longer), "--vocab", "16"]) == 0
    assert "rows 16 to 19 are vocabulary padding in B (the vocabulary has 16 entries)" in capsys.readouterr().out


def test_quiet_prints_the_verdict_alone(files, capsys):
    main(["ckpt-compare", "-q", *files(nudge)])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_missing_tensor_gives_three(files):
    assert main(["ckpt-compare", *files(lambda b: b.pop("model.norm.weight"))]) == 3


def test_an_unknown_kind_of_content_gives_three_with_a_suggestion(files, capsys):
    assert main(["ckpt-compare", "--what", "weight", *files()]) == 3
    assert "did you mean 'weights'" in capsys.readouterr().err


def test_a_path_that_does_not_exist_gives_three(files, capsys):
    assert main(["ckpt-compare", files()[0], "/no/such/thing"]) == 3
    assert "/no/such/thing does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ckpt-show {0}", "ckpt-show {0} --check", "ckpt-compare {0} {0}", "ckpt-show {1}"])
def test_a_gguf_file_is_refused_with_what_to_compare_instead(tmp_path, capsys, command):
    file = tmp_path / "model-q4.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64))
    assert main(command.format(file, tmp_path).split()) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "model-q4.gguf is a GGUF file (llama.cpp), which ckpt-compare and ckpt-show do not read" in said
    assert "from_pretrained(folder, gguf_file='model-q4.gguf').save_pretrained(out)" in said


def test_json_has_the_classic_shape_for_every_tensor(files, tmp_path):
    main(["ckpt-compare", "--json", str(tmp_path / "o.json"), *files(nudge)])
    found = json.loads((tmp_path / "o.json").read_text())
    summary = found.pop("__comparison__")
    assert (summary["verdict"], summary["exit_code"], summary["missing"], summary["faults"]) == ("differ", 2, [], [])
    entry = found["layers.1.mlp.fc2.weight"]
    assert sum("verdict" in held for held in found.values()) == 11  # the others are names in the files
    assert (entry["l2"], entry["numel"], entry["shape"], entry["max_abs_at"]) == (
        pytest.approx(1, abs=1e-6),
        64,
        [8, 8],
        [2, 3],
    )
    assert (entry["changed"], entry["verdict"], entry["dtype"]) == (1 / 64, "differ", ["float32", "float32"])


def test_json_holds_moves_causes_and_missing_files(files, tmp_path):
    def exchange(b):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            one, two = f"model.layers.0.{part}.weight", f"model.layers.2.{part}.weight"
            b[one], b[two] = b[two], b[one].copy()

    whole, exchanged = files(exchange)
    out = tmp_path / "o.json"
    assert main(["ckpt-compare", "--json", str(out), whole, exchanged]) == 2
    summary = json.loads(out.read_text())["__comparison__"]
    moved = {(m["a"], m["b"]) for m in summary["moves"]}
    assert {
        ("layers.0.mlp.fc2.weight", "layers.2.mlp.fc2.weight"),
        ("layers.2.mlp.fc2.weight", "layers.0.mlp.fc2.weight"),
    } <= moved
    assert [c["sentence"] for c in summary["causes"]] == ["layers 0 and 2 are exchanged"]

    shards = tmp_path / "shards"
    shards.mkdir()
    index = {name: f"{'lost' if 'layers.2' in name else 'held'}.safetensors" for name in model()}
    save_file({k: v for k, v in load_file(whole).items() if "layers.2" not in k}, shards / "held.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert main(["ckpt-compare", "--json", str(out), whole, str(shards)]) == 3
    summary = json.loads(out.read_text())["__comparison__"]
    assert (summary["verdict"], summary["exit_code"]) == ("incomplete", 3)
    assert [(f["side"], Path(f["where"]).name) for f in summary["faults"]] == [("B", "lost.safetensors")]
    assert {m["name"] for m in summary["missing"]} >= {"layers.2.mlp.fc2.weight"}


def test_json_of_a_check_holds_what_is_wrong_with_a_checkpoint(files, capsys):
    def spoil(b):
        b["model.norm.weight"][3] = np.inf

    sound, spoiled = files(spoil)
    assert main(["ckpt-show", "--check", "--json", sound]) == 0
    assert json.loads(capsys.readouterr().out)["check"] == {"verdict": "sound", "exit_code": 0, "faults": []}
    assert main(["ckpt-show", "--check", "--json", spoiled]) == 2
    check = json.loads(capsys.readouterr().out)["check"]
    assert (check["exit_code"], [f["where"] for f in check["faults"]]) == (2, ["final_norm.weight"])
    assert check["faults"][0]["message"].startswith("0 NaN and 1 infinite of 8 elements")


def test_json_says_null_and_both_shapes_for_what_has_no_partner(files, tmp_path):
    def cut(b):
        b["model.norm.weight"] = b["model.norm.weight"][:5]

    main(["ckpt-compare", "--json", str(tmp_path / "o.json"), *files(cut)])
    entry = json.loads((tmp_path / "o.json").read_text())["final_norm.weight"]
    assert (entry["l2"], entry["cos"], entry["numel"], entry["shape"]) == (None, None, [8, 5], [[8], [5]])


def test_csv_has_the_worst_tensor_in_its_first_line(files, tmp_path):
    main(["ckpt-compare", "--csv", str(tmp_path / "o.csv"), *files(nudge)])
    with (tmp_path / "o.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (len(rows), rows[0]["name"], rows[0]["shape_a"]) == (11, "layers.1.mlp.fc2.weight", "8x8")


def test_the_page_is_one_file_that_loads_nothing(files, tmp_path):
    main(["ckpt-compare", "--html", str(tmp_path / "o.html"), *files(nudge)])
    page = (tmp_path / "o.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|fetch\(""", page)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert (data["code"], data["maps"][0]["layers"], len(data["rows"])) == (2, [0, 1, 2], 11)


def test_a_tensor_name_cannot_break_out_of_the_page(files, tmp_path):
    evil = "</script><script>alert(1)</script>"
    main(["ckpt-compare", "--html", str(tmp_path / "o.html"), *files(lambda b: b.update({evil: np.ones(2, np.float32)}))])
    assert "<script>alert" not in (tmp_path / "o.html").read_text()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_page_says_of_nan_and_infinity_what_the_console_says(files, tmp_path, value):
    def spoil(b):
        b["model.layers.1.mlp.down_proj.weight"][2, 3] = value

    main(["ckpt-compare", "--html", str(tmp_path / "o.html"), *files(spoil)])
    page = (tmp_path / "o.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    (row,) = (row for row in data["rows"] if row["verdict"] == "differ")
    assert [row[k] for k in ("relative_l2", "l2", "cos", "max_abs", "max_ulp")] == ["nan/inf"] * 3 + ["inf"] * 2
    assert ["differ", None, row["name"]] in [cell for line in data["maps"][0]["grid"] for cell in line]


@pytest.mark.slow
def test_the_page_draws_its_heatmap_in_a_browser(files, tmp_path):
    browser = Browser(require_chromium())
    main(["ckpt-compare", "--html", str(tmp_path / "o.html"), *files(nudge)])
    try:
        browser.open(tmp_path / "o.html")
        assert browser.run("document.querySelectorAll('.map td').length") == 3 * 3
        assert browser.run("document.getElementById('sentence').textContent").startswith("differ: 1 of 11 tensors")
        looks = browser.run("[...document.querySelectorAll('.map td')].map(cell => cell.getAttribute('style'))")
        assert looks.count("background: var(--identical)") == 8
        assert "NaN or infinity on one side" in browser.run("document.querySelector('.legend').textContent")
        assert browser.run("document.querySelector('td.under').textContent").startswith("at [2,3] · ")
        assert browser.run("document.querySelector('td.under').colSpan") == 10
        browser.run("(s => { s.value = ''; s.dispatchEvent(new Event('change')) })(document.getElementById('filter'))")
        browser.run("[...document.querySelectorAll('#list th')].find(head => head.textContent === 'tensor').click()")
        names = browser.run("[...document.querySelectorAll('#list td.name')].map(cell => cell.textContent)")
        assert names == sorted(names, reverse=True)
        assert len(names) == 11
        assert browser.errors == []
    finally:
        browser.close()


def test_show_lists_logical_tensors(files, capsys):
    assert main(["ckpt-show", files()[0]]) == 0
    said = capsys.readouterr().out
    assert "layers.2.attention.q.weight" in said
    assert "8×8" in said


def test_show_tells_a_small_size_in_small_units(tmp_path, capsys):
    torch.save({"a": torch.zeros(3, 4), "b": torch.zeros(1000)}, tmp_path / "small.pt")
    assert main(["ckpt-show", str(tmp_path / "small.pt")]) == 0
    assert capsys.readouterr().out.startswith("plain_torch: 2 tensors, 4.048 kB\n")


def test_show_gives_names_as_they_stand_when_asked(files, capsys):
    main(["ckpt-show", "--native", files()[0]])
    assert "model.layers.2.self_attn.q_proj.weight" in capsys.readouterr().out


def test_show_prints_json_with_fingerprints(files, capsys):
    main(["ckpt-show", "--json", "--fingerprint", files()[0]])
    found = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"[0-9a-f]{16}", found["tensors"]["final_norm.weight"]["fingerprint"])


def test_every_format_module_offers_what_the_folder_promises():
    for name in formats.names():
        assert callable(formats.get(name).sniff)
        assert callable(formats.get(name).open)


def test_no_format_claims_a_foreign_file_or_an_empty_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    assert not [n for n in formats.names() for p in (tmp_path / "notes.txt", tmp_path / "empty") if formats.get(n).sniff(p)]


def test_comparing_needs_neither_torch_nor_any_framework(files):
    script = f"""
        import sys
        from trainprobe.cli import main
        code = main(["ckpt-compare", "-q", {files()[0]!r}, {files()[1]!r}])
        heavy = {{"torch", "megatron", "deepspeed", "mindspore", "lightning", "transformers"}} & set(sys.modules)
        sys.exit(code or (9 if heavy else 0))
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to tell the peak of a process")
def test_memory_stays_far_below_the_size_of_the_files(tmp_path):
    """Two files of 1.2 GB, each one tensor: resident memory must not follow."""
    n = 300_000_000
    for name in "ab":
        header = json.dumps({"w": {"dtype": "F32", "shape": [n // 1000, 1000], "data_offsets": [0, 4 * n]}}).encode()
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            os.truncate(file.fileno(), 8 + len(header) + 4 * n)
    script = f"""
        import sys
        from pathlib import Path
        from trainprobe.cli import main
        assert main(["ckpt-compare", "-q", {str(tmp_path / "a.safetensors")!r}, {str(tmp_path / "b.safetensors")!r}]) == 0
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # KiB; ru_maxrss is inherited
        print(int(peak) // 1024, file=sys.stderr)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(ran.stderr.split()[-1]) < 600  # MiB, of 2400 MB read


def test_only_and_ignore_choose_what_counts(files, capsys, tmp_path):
    assert main(["ckpt-compare", *files(nudge), "--only", "layers.0.*"]) == 0
    assert "A: --only left out 8 of 11 tensors" in capsys.readouterr().out
    assert main(["ckpt-compare", *files(nudge), "--only", "layers.1.*", "--only", "final*"]) == 2
    assert main(["ckpt-compare", *files(nudge), "--ignore", "*.mlp.*"]) == 0
    assert main(["ckpt-compare", *files(nudge), "--only", "layers.0.*", "--only", "layer.1.*"]) == 64
    assert "--only layer.1.* matches no tensor of either checkpoint" in " ".join(capsys.readouterr().err.split())
    assert main(["ckpt-compare", *files(nudge), "--only", "model.layers.0.mlp.*"]) == 64
    said = "patterns are for logical names: model.layers.0.mlp.down_proj.weight of the files is layers.0.mlp.fc2.weight"
    assert said in " ".join(capsys.readouterr().err.split())
    assert main(["ckpt-compare", *files(nudge), "--ignore", "*"]) == 64
    assert "--only and --ignore leave no tensor" in " ".join(capsys.readouterr().err.split())
    assert main(["ckpt-compare", *files(nudge), "--ignore", "nothing.*"]) == 2
    assert "--ignore nothing.* matches no tensor of either checkpoint" in capsys.readouterr().out


def test_the_first_line_says_what_is_lost_beside_what_differs(files, capsys):
    def edit(b):
        nudge(b)
        del b["model.norm.weight"]

    assert main(["ckpt-compare", *files(edit), "-q"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("differ: 1 of 11 tensors; ")
    assert said.rstrip().endswith("; also, 1 tensor is only in A")


def test_a_tolerance_is_a_verdict_of_its_own(files, capsys, tmp_path):
    def small(b):
        b["model.layers.1.mlp.down_proj.weight"] += np.float32(1e-3)

    assert main(["ckpt-compare", *files(small)]) == 2
    assert main(["ckpt-compare", *files(small), "--atol", "0.0005"]) == 2
    capsys.readouterr()
    assert main(["ckpt-compare", *files(small), "--atol", "0.002"]) == 1
    said = "equal within the tolerance that was given: 1 of 11 tensors differ by at most 0.001 (layers.1.mlp.fc2.weight)"
    assert capsys.readouterr().out.startswith(said)
    assert main(["ckpt-compare", *files(small), "--rtol", "0.01", "--json", str(tmp_path / "o.json")]) == 1
    summary = json.loads((tmp_path / "o.json").read_text())["__comparison__"]
    assert summary["tolerated"] == ["layers.1.mlp.fc2.weight"]
    assert summary["checkpoints"]["B"]["format"] == "huggingface"

    def broken(b):
        b["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan

    assert main(["ckpt-compare", *files(broken), "--atol", "1e30", "--rtol", "1e30"]) == 2
    assert main(["ckpt-compare", *files(), "--atol", "nan"]) == 64
