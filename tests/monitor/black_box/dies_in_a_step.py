"""A training that dies within step 5: dies_in_a_step.py FOLDER HOW WHERE, or several one after the other: FOLDER HOW,WHERE ….

Several are children of one process that has imported torch: their folders are FOLDER/HOW-WHERE, what each prints is in
FOLDER/HOW-WHERE.out, and the process prints their exit statuses as JSON.

HOW: a signal's name, abort, segfault, raise; stuck: SIGTERM comes while the training waits in C for ever; held: it waits in C
with the interpreter's lock until somebody kills it. WHERE: forward (of
module "1.fc", micro-batch 1), backward (of micro-batch 1), inside (in the backward pass, behind the
gradient of "1.fc"), optimizer. Prints the norm of what module "0" handed on last.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time

import torch

import trainprobe

STEP = 5
NEEDED = (  # imported once, by the parent
    *(
        "torch._dynamo",
        "trainprobe.run.torch_taps",
        "trainprobe.engine.storage.sinks.jsonl",
        "trainprobe.engine.storage.writer",
        "trainprobe.monitor.findings",
    ),
    *("trainprobe.engine.capture.random_state", "trainprobe.monitor.black_box.box"),
)


def die(how: str) -> None:
    print(norm, flush=True)
    if how == "abort":
        os.abort()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "raise":
        raise KeyError("the data ran out")
    if how == "held":
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
        while True:
            libc.pause()
    if how == "stuck":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(600)


class Fatal(torch.nn.Linear):
    """Dies in its forward when it is told to."""

    deadly = ""

    def forward(self, x):
        if self.deadly:
            die(self.deadly)
        return super().forward(x)


class FatalGradient(torch.autograd.Function):
    """Hands its input on and dies when the gradient comes."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        die(ctx.how)


class FatalStep(torch.optim.AdamW):
    """Dies in its step when it is told to."""

    deadly = ""

    def step(self, closure=None):
        if self.deadly:
            die(self.deadly)
        return super().step(closure)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = Fatal(8, 8)
        self.deadly = ""

    def forward(self, x):
        return self.fc(FatalGradient.apply(x, self.deadly) if self.deadly else x)


def main(folder: str, how: str, where: str) -> None:
    global norm
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Inner(), torch.nn.Linear(8, 8))
    optimizer = FatalStep(model.parameters(), lr=0.01)
    plan = {
        "level": "off",
        "sinks": ["jsonl"],
        "monitor": {"activation_gradients": True},
        "black_box": {"steps": 4, "max_bytes": "4 MiB"},
    }
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        for step in range(STEP + 1):
            with probe.step(step):
                optimizer.zero_grad()
                for micro in range(2):
                    now = step == STEP and micro == 1
                    x = torch.randn(4, 8)
                    norm = torch.nn.functional.linear(x, *model[0].parameters()).norm().item()
                    model[1].fc.deadly = how if now and where == "forward" else ""
                    model[1].deadly = how if now and where == "inside" else ""
                    y = model(x)
                    y = FatalGradient.apply(y, how) if now and where == "backward" else y
                    y.square().mean().backward()
                optimizer.deadly = how if step == STEP and where == "optimizer" else ""
                optimizer.step()


def die_in_a_child(folder: str, how: str, where: str) -> int:
    """Return the exit status of a process of its own."""
    child = os.fork()
    if not child:
        to = os.open(f"{folder}/{how}-{where}.out", os.O_CREAT | os.O_WRONLY)
        os.dup2(to, 1)
        try:
            main(f"{folder}/{how}-{where}", how, where)
        finally:
            os._exit(70)  # it should have died
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    if "," in sys.argv[2]:
        for needed in NEEDED:
            importlib.import_module(needed)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        every = [asked.split(",") for asked in sys.argv[2:]]
        print(json.dumps({f"{how}-{where}": die_in_a_child(sys.argv[1], how, where) for how, where in every}))
    else:
        main(*sys.argv[1:])
