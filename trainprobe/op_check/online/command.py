"""`trainprobe op-check serve` and `trainprobe op-check certs`."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from trainprobe.engine.plan.field_types import parse_bytes
from trainprobe.errors import UsageError

if TYPE_CHECKING:
    from trainprobe.op_check.online.server import Server, Settings


def op_check_serve(
    listen: Annotated[
        str,
        typer.Option(
            help="HOST:PORT to listen on, by default 127.0.0.1:7700 unless there is --folder; port 0 takes a free one"
        ),
    ] = "",
    folder: Annotated[Path | None, typer.Option(help="a folder that both machines share")] = None,
    tls: Annotated[Path | None, typer.Option(help="folder with ca.pem, cert.pem, key.pem and perhaps crl.pem")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="listen beyond this machine without TLS")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the reports")] = Path("op_check_server"),
    ranks: Annotated[str, typer.Option(help="ranks that are judged, such as 0,8 or 0-7; all by default")] = "",
    device: Annotated[
        str, typer.Option(help="three ways: run each call on this device of the server as well, such as cuda or cpu")
    ] = "",
    max_bytes: Annotated[str, typer.Option(help="most memory for calls that wait, over all connections")] = "4 GiB",
    connections: Annotated[
        int, typer.Option(help="most trainings (ranks) at once; each gets its share of --max-bytes", min=1)
    ] = 4,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's own number", min=0)] = 0,
    patience: Annotated[float, typer.Option(help="seconds of silence until a connection is doubted", min=0.1)] = 30.0,
    once: Annotated[bool, typer.Option("--once", help="end when every training that came has ended")] = False,
) -> int:
    """Judge operators of trainings on other machines, while they train, against float64 references on this one.

    Ends with --once, or by Ctrl-C. Exit code, of all ranks together: 0 all are right within their own rounding, 1 some are
    suspicious or in another mode, 2 a bug, 3 some were not checked.
    """
    from trainprobe.op_check.command import need_torch
    from trainprobe.op_check.online.server import Settings

    need_torch(threads)
    try:
        settings = Settings(output, _ranks(ranks), device, int(str(parse_bytes(max_bytes))), connections, patience, once)
    except ValueError as error:
        raise UsageError(str(error)) from None
    _try_device(device)
    return asyncio.run(_serve(settings, listen, folder, tls, insecure))


def op_check_certs(
    folder: Annotated[Path, typer.Argument(help="where ca/, server/ and training/ are written")],
    host: Annotated[
        list[str] | None, typer.Option(help="name or address by which the training calls the server; may be given again")
    ] = None,
    days: Annotated[float, typer.Option(help="how long they are valid")] = 30.0,
    revoke: Annotated[str, typer.Option(help="add the certificate of `server` or `training` to the list of revoked ones")] = "",
) -> int:
    """Make a CA of your own and the keys of both sides, for a test, or revoke one of them."""
    from trainprobe.op_check.online import certs

    console = Console()
    if revoke:
        certs.revoke(folder, revoke, days)
        text = f"the certificate of {revoke} is revoked from now on: start the server again, so that it reads the new list"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return 0
    certs.make(folder, host or (), days)
    for line in (
        f"keys for {days:g} days: {folder / 'ca'} signs (keep it apart), one folder for each side",
        f"reference machine: trainprobe op-check serve --listen 0.0.0.0:7700 --tls {folder / 'server'}",
        f"training's plan:   op_check: {{server: HOST:7700, tls: {folder / 'training'}}}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


async def _serve(settings: Settings, listen: str, folder: Path | None, tls: Path | None, insecure: bool) -> int:
    from trainprobe.op_check.online.server import Server

    console = Console()

    def say(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)

    server = Server(settings, say)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    listener = None
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: make it, where both machines see it")
    if listen or folder is None:
        listener = await _listen(server, listen or "127.0.0.1:7700", tls, insecure)
        host, port = listener.sockets[0].getsockname()[:2]
        say(f"listening on {host}:{port}{'' if tls else ' without TLS'}; reports go to {settings.output}")
    waits = [stop.wait(), server.finished()]
    if folder is not None:
        say(f"looking into {folder}; reports go to {settings.output}")
        waits.append(server.serve_folder(folder))
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if listener is not None:
        listener.close()
    for task in tasks:
        task.cancel()
    await server.close()
    for task in done:
        task.result()
    codes = [report.code() for report in server.reports]
    for report in server.reports:
        say(f"{report.folder}: {report.sentence()}")
    return max(codes, key=lambda code: {0: 0, 1: 1, 3: 2, 2: 3}[code], default=3)


async def _listen(server: Server, listen: str, tls: Path | None, insecure: bool) -> asyncio.Server:
    from trainprobe.op_check.online.addresses import is_loopback, split_address
    from trainprobe.op_check.online.credentials import context

    try:
        host, port = split_address(listen)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None
    if tls is None and not insecure and not is_loopback(host):
        raise UsageError(
            f"{listen} can be reached from other machines and there is no --tls: name a folder of keys "
            "(`trainprobe op-check certs DIR` makes one), or insist with --insecure"
        )
    secure = None if tls is None else context(tls, server=True)
    try:
        return await server.serve_tcp(host, port, secure)
    except OSError as error:
        raise UsageError(f"cannot listen on {listen}: {error.strerror or error}") from None


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    found: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise UsageError(f"--ranks {text}: {piece!r} is no rank and no range of ranks, such as 0,8 or 0-7")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _try_device(device: str) -> None:
    """Raise UsageError for a device that this machine does not have."""
    import torch

    if not device:
        return
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {(str(error).splitlines() or ['it is not there'])[0]}") from None
