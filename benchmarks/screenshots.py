"""Every kind of page, made from small real runs, and how each looks on three screens, light and dark.

    python -m benchmarks.screenshots OUT             # all pages, a minute or two
    python -m benchmarks.screenshots OUT --only show # one of them

OUT gets NAME.html of each page, and NAME-WIDTHxHEIGHT-SCHEME.png of what the screen shows first and, in OUT/whole, of the whole
page. What a program can see is printed: an error on the console, a request, a page that is wider than the screen. Exit code 1
where there is one. All else has to be looked at.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import trainprobe
from benchmarks.config_bench.case import TRAIN, Edit
from benchmarks.config_bench.runner import prepare, train
from benchmarks.fleet import Fleet, planted_in, write_fleet
from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.cli import main as trainprobe_main
from trainprobe.demo.gpt import GPT, Shape, next_token_loss

SCREENS = ((390, 844), (1280, 800), (1920, 1080))
SCHEMES = ("light", "dark")
TALLEST = 8000  # pixels of a page that are kept


def command(*words: str | Path) -> int:
    """Run a command of trainprobe quietly, and return its exit code."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return trainprobe_main([str(word) for word in words])


def gpt_run(output: Path, steps: int = 1, rate: float = 1e-3, approximate: str = "none", **plan: object) -> Path:
    """Train a GPT of three layers on random tokens, watched under a plan; return the folder of the run."""
    torch.manual_seed(0)
    model = GPT(Shape(layers=3, width=32, heads=4, context=16, vocabulary=64))
    for layer in model.layers:
        layer.mlp.act = nn.GELU(approximate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with trainprobe.watch(model, optimizer, output=str(output), console=False, **plan) as probe:
        for _ in range(steps):
            with probe.step():
                tokens = torch.randint(64, (4, 17))
                loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
    return output


def report_of_findings(work: Path, page: Path) -> int:
    """The optimizer was made before the model got its head, and from step 60 on the rate is far too high."""
    torch.manual_seed(0)
    model = GPT(Shape(layers=3, width=32, heads=4, context=16, vocabulary=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.head = nn.Linear(32, 64, bias=False)
    with trainprobe.watch(model, optimizer, output=str(work / "run"), console=False) as probe:
        for step in range(120):
            with probe.step():
                optimizer.param_groups[0]["lr"] = 1e-3 if step != 100 else 1.0
                tokens = torch.randint(64, (4, 17)).sort().values
                loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
    return command("report", work / "run", "-o", page)


def report_with_a_needle(work: Path, page: Path) -> int:
    """A healthy run of noisy batches, one of which gives about five times the usual loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with trainprobe.watch(model, optimizer, output=str(work / "run"), console=False) as probe:
        for step in range(200):
            with probe.step():
                size = torch.randn(()).mul(0.2).exp() * (2.2 if step == 150 else 1)
                loss = (model(torch.randn(32, 16)) - size * torch.randn(32, 1)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
    return command("report", work / "run", "-o", page)


def report_of_two_runs(work: Path, page: Path) -> int:
    """The second run has three times the rate."""
    a, b = (gpt_run(work / name, 60, rate) for name, rate in (("a", 1e-3), ("b", 3e-3)))
    return command("report", a, "--beside", b, "-o", page)


def dump_compare(work: Path, page: Path) -> int:
    """The second run approximates GELU."""
    a, b = (gpt_run(work / name, approximate=how, record="mix", task="tensor") for name, how in (("a", "none"), ("b", "tanh")))
    return command("dump-compare", a, b, "--html", page)


def show(work: Path, page: Path) -> int:
    """One step at both levels."""
    return command("show", gpt_run(work / "run", record="mix"), "-o", page)


def op_check(work: Path, page: Path) -> int:
    """A step with one element of one product changed on the disk."""
    run = gpt_run(work / "run", record="L1", task="tensor")
    (file,) = run.rglob("tensors.safetensors")
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    name = next(name for name in tensors if name.startswith("Functional.linear.3.forward.output"))
    tensors[name].view(-1)[17] *= 1.01
    save_file(tensors, file)
    return command("op-check", run, "--html", page)


def ckpt_compare(work: Path, page: Path) -> int:
    """A conversion that exchanged two layers and rounded one matrix."""
    torch.manual_seed(0)
    a = GPT(Shape(layers=8, width=32)).state_dict()
    a = {name: t + 0.01 * torch.randn_like(t) for name, t in a.items()}
    turn = {"layers.2.": "layers.5.", "layers.5.": "layers.2."}
    b = {next((new + n[len(old) :] for old, new in turn.items() if n.startswith(old)), n): t for n, t in a.items()}
    b["head.weight"] = b["head.weight"].bfloat16().float()
    torch.save(a, work / "a.pt")
    torch.save(b, work / "b.pt")
    return command("ckpt-compare", work / "a.pt", work / "b.pt", "--html", page)


def config_check(work: Path, page: Path) -> int:
    """The second run has another learning rate, another seed and a variable of the environment."""
    edits = (Edit(TRAIN, "lr=0.01", "lr=0.02"), Edit(TRAIN, "torch.manual_seed(13)", "torch.manual_seed(14)"))
    packs: list[Path] = []
    for name, changed, variables in (("a", (), {}), ("b", edits, {"NCCL_ALGO": "Ring"})):
        prepare(work / name, changed)
        packs.append(train(work / name, variables, {}, ()))
    code = command("config-check", "compare", *packs, "-o", work / "told", "-f", "html")
    shutil.copy(work / "told" / "result.html", page)
    return code


def fleet(work: Path, page: Path) -> int:
    """Thirty-two ranks with a fault of each kind."""
    shape = Fleet(data=8, tensor=2, pipeline=2, steps=40, parameters=4, activations=10)
    faults = planted_in(shape)
    write_fleet(Fleet(8, 2, 2, 40, parameters=4, activations=10, planted=faults), work / "fleet")
    return command("report", "--fleet", work / "fleet", "-o", page)


# page → what makes it, and the exit code with which its command says what was planted
def rollout_compare(work: Path, page: Path) -> int:
    """Show log-probabilities of which one side was scored at another temperature, in text that can be read."""
    chance = torch.Generator().manual_seed(0)
    rows, length = 24, 64
    logits = 3 * torch.randn(rows, length, 50, generator=chance)
    tokens = torch.distributions.Categorical(logits=logits).sample()
    trainer, engine = (
        (logits / t).log_softmax(-1).gather(-1, tokens[..., None])[..., 0] + 1e-3 * torch.randn(rows, length, generator=chance)
        for t in (1.0, 0.7)
    )
    columns = {"tokens": tokens, "trainer_logprobs": trainer, "engine_logprobs": engine}
    columns["mask"] = (torch.arange(length) < torch.randint(8, length, (rows, 1), generator=chance)).int()
    columns["version"] = torch.arange(rows) // 8
    save_file(columns, work / "step12.safetensors")
    return command("rollout-compare", work / "step12.safetensors", "--html", page)


PAGES: dict[str, tuple[Callable[[Path, Path], int], int]] = {
    "report": (report_of_findings, 0),
    "report-needle": (report_with_a_needle, 0),
    "report-beside": (report_of_two_runs, 0),
    "dump-compare": (dump_compare, 2),
    "show": (show, 0),
    "op-check": (op_check, 2),
    "ckpt-compare": (ckpt_compare, 2),
    "config-check": (config_check, 2),
    "rollout-compare": (rollout_compare, 2),
    "fleet": (fleet, 0),
}


def make_pages(out: Path, names: list[str]) -> dict[str, Path]:
    """Make pages from runs in a folder that is removed; return where each lies. Raises RuntimeError for another exit code."""
    pages: dict[str, Path] = {}
    for name in names:
        make, code = PAGES[name]
        pages[name] = out / f"{name}.html"
        with tempfile.TemporaryDirectory() as work:
            got = make(Path(work), pages[name])
        if got != code:
            raise RuntimeError(f"the command behind {name} ended with {got}, not {code}: its run is not what it should be")
        print(f"{name}: {pages[name].stat().st_size / 1024:.0f} KiB", flush=True)
    return pages


def take(browser: Browser, name: str, page: Path, out: Path) -> list[str]:
    """Take all screenshots of a page; return what a program can see of what is wrong."""
    wrong: list[str] = []
    for scheme in SCHEMES:
        browser.scheme(scheme)
        for width, height in SCREENS:
            browser.errors.clear()
            browser.requests.clear()
            browser.resize(width, height)
            browser.open(page)
            browser.run("new Promise(done => setTimeout(done, 300))")
            where = f"{name}-{width}x{height}-{scheme}"
            browser.screenshot(out / f"{where}.png", full=False)
            wide, tall = browser.run("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            browser.resize(width, min(tall, TALLEST))
            browser.screenshot(out / "whole" / f"{where}.png", full=False)
            wrong += [f"{where}: {error}" for error in browser.errors]
            wrong += [f"{where}: asks for {url}" for url in browser.requests if not url.startswith(("file:", "data:"))]
            wrong += [f"{where}: {wide} pixels wide"] if wide > width else []
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=PAGES, action="append", help="may be given again")
    chosen = parser.parse_args()
    (chosen.out / "whole").mkdir(parents=True, exist_ok=True)
    browser = Browser(require_chromium())
    try:
        wrong = [
            line
            for name, page in make_pages(chosen.out, chosen.only or list(PAGES)).items()
            for line in take(browser, name, page, chosen.out)
        ]
    finally:
        browser.close()
    print("\n".join(wrong or ["no error, no request, nothing wider than its screen"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
