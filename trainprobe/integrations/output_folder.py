"""Which folder a run is written to: a new one beside earlier runs, and a training that goes on behind the run it continues."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.records import Place
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.layout import log_folder
from trainprobe.engine.storage.safe_files import NO_LINK, PRIVATE, SMALL, open_to_read, private_folder, read_text
from trainprobe.engine.storage.step_counts import read_counts
from trainprobe.errors import FormatError
from trainprobe.integrations.auto_attach import EARLIER, OUTPUT

MARKER = ".launch"  # file of a folder that several processes write to: what they have in common, and no other launch has
LOOKED_AT = 16  # parameters: a counter on a device is waited for
_opened: Counter[Path] = Counter()  # how often this process has asked for each folder


def placed(plan: Plan, here: Place, *, resumed: bool = False, hint: Any = None) -> Plan:
    """Return the plan with the folder that this run writes to; a line on rank 0 tells of an earlier run there.

    here: where this process stands, as its framework says. resumed: the training goes on from a checkpoint, by the word of its
    framework or by `steps_to_go_on_from`; it is written behind the newest earlier run. hint: the folder of the run that made
    the checkpoint, where the checkpoint says it.
    """
    asked = plan.output
    if resumed:
        output = _of_earlier(asked, hint) if plan.on_existing == "beside" else asked
        if _holds_run(output):
            _tell(plan, here, f"the training goes on with the run in {output}")
        return load_plan(plan, output=output, on_existing="continue")
    turn, _opened[asked] = _opened[asked], _opened[asked] + 1
    if plan.on_existing != "beside" or (turn == 0 and _is_decided(asked)):
        return plan
    try:
        launch = _launch(turn, asked, here.world_size)
        output = asked if launch is None else _free(asked, launch)
    except OSError:  # told when the folder is opened
        return plan
    if output == asked:
        return plan
    _tell(plan, here, f"{asked} holds an earlier run: this one is written to {output}")
    return load_plan(plan, output=output)


def _tell(plan: Plan, here: Place, sentence: str) -> None:
    if here.rank == 0 and plan.console:
        say(sentence)


def free_folder(folder: Path) -> tuple[Path, Path | None]:
    """Return a folder that holds no run, `folder` or the first free `folder.2`, `folder.3` …, and the one before it."""
    earlier = None
    for free in family(folder):
        if not _holds_run(free):
            return free, earlier
        earlier = free
    raise AssertionError


def family(folder: Path) -> Iterator[Path]:
    """Yield `folder`, `folder.2`, `folder.3` and so on, without an end."""
    yield folder
    for number in count(2):
        yield folder.with_name(f"{folder.name}.{number}")


def asked_output(output: Path) -> Path:
    """Return the folder that was asked for, if `trainprobe run` put `output` next to it."""
    beside = os.environ.get(EARLIER) and output == Path(os.environ.get(OUTPUT, ""))
    return output.with_name(output.name.rpartition(".")[0]) if beside else output


def steps_to_go_on_from(plan: Plan, here: Place, optimizers: Iterable[Any]) -> int:
    """Return how many updates a training has behind it that goes on with the newest earlier run, 0 for a new one.

    The counters in the optimizers' state say how many; that run must have recorded as many steps, and must be over.
    """
    earlier = _newest(plan.output)
    if plan.on_existing != "beside" or earlier is None:
        return 0
    made = max(map(updates_made, optimizers), default=0)
    own = read_counts(log_folder(earlier, here.rank))
    known = read_counts(log_folder(earlier, 0)) or own
    if own is None or known is None or own.alive:
        return 0
    recorded = max((sink.handed or 0 for sink in known.sinks.values()), default=0)
    return made if made <= recorded else 0


def updates_made(optimizer: Any) -> int:
    """Return the highest step counter of the first parameters of an optimizer of torch.optim, 0 where it has none."""
    state: Any = getattr(optimizer, "state", None)
    kept = islice(state.values(), LOOKED_AT) if hasattr(state, "values") else ()
    counters = [entry["step"] for entry in kept if isinstance(entry, dict) and "step" in entry]
    return max((attempt(int, getattr(one, "_local_tensor", one), otherwise=lambda _: 0) for one in counters), default=0)


def _of_earlier(asked: Path, hint: Any) -> Path:
    """Return where a training that is resumed goes on: where the checkpoint says, if that is beside, else in the newest run."""
    told = [one for one in _taken(asked_output(asked)) if str(one) == str(hint)]
    return told[0] if told else _newest(asked) or asked


def _newest(asked: Path) -> Path | None:
    """Return the newest earlier run, None where there is none."""
    told = os.environ.get(EARLIER)
    if told and asked == Path(os.environ.get(OUTPUT, "")):
        return Path(told)
    return free_folder(asked)[1]


def _taken(folder: Path) -> Iterator[Path]:
    for one in family(folder):
        if not _holds_run(one):
            return
        yield one


def _holds_run(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in ("rank*", "step*/rank*"))


def _is_decided(asked: Path) -> bool:
    """Tell whether `trainprobe run` has decided where these processes write; those that are started anew decide again."""
    decided = EARLIER in os.environ and asked == Path(os.environ.get(OUTPUT, ""))
    return decided and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


# ---- several processes of one run -----------------------------------------------------------------------------------------


def _launch(turn: int, asked: Path, ranks: int) -> str | None:
    """Return what the processes of this run have in common at this turn, "" for a single one, None where nothing tells."""
    if ranks == 1:
        return ""
    common = attempt(_from_store, f"trainprobe/{asked}/{turn}", otherwise=lambda _: None) or _from_environment()
    return common and f"{common} {turn}"


def _from_store(key: str) -> str | None:
    """Return a word that the first rank to come puts into the store of torch.distributed; None before that is set up."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().compare_set(key, "", secrets.token_hex(16)).decode()


def _from_environment() -> str | None:
    """Return what the launcher says: on one machine the process that started all ranks, on several the number of the job."""
    env = os.environ
    again = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = env.get("MASTER_ADDR", env.get("MS_SCHED_HOST")) in ("127.0.0.1", "localhost", "::1")
    if own or env.get("LOCAL_WORLD_SIZE", "") == env.get("WORLD_SIZE"):
        return f"{socket.gethostname()} {os.getppid()} {_started(os.getppid())} {again}"
    if "SLURM_JOB_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']} {env.get('SLURM_STEP_ID', '')} {env.get('SLURM_RESTART_COUNT', '')} {again}"
    job = env.get("TORCHELASTIC_RUN_ID", "none")
    return f"elastic {job} {again}" if job != "none" else None


def _started(process: int) -> str:
    """Return when a process was started, in ticks since the machine was; empty where the system does not tell."""
    try:
        with open_to_read(Path(f"/proc/{process}/stat")) as file:
            return file.read(SMALL).decode(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, FormatError, IndexError):
        return ""


def _free(asked: Path, launch: str) -> Path:
    """Return the first folder that holds no run, or that this launch has taken. Raises OSError."""
    for folder in family(asked):
        holds = _holds_run(folder)  # first: whoever takes a folder writes the marker before anything else
        marker = folder / MARKER
        if not launch and not holds and not marker.exists():
            return folder
        if launch and (_read(marker) == launch if marker.exists() else not holds and _take(marker, launch)):
            return folder
    raise AssertionError


def _take(marker: Path, launch: str) -> bool:
    """Write the marker, or return whether another process of this launch was faster."""
    private_folder(marker.parent)
    try:
        handle = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, PRIVATE)
    except FileExistsError:
        return _read(marker) == launch
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(launch)
    return True


def _read(marker: Path) -> str:
    """Return what a marker says; one that is empty is being written."""
    for _ in range(100):
        text = read_text(marker, SMALL)
        if text:
            return text
        time.sleep(0.01)
    return ""
