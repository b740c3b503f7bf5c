"""Pairs of runs that differ in nothing that decides numbers: the comparison must pass."""

from __future__ import annotations

from benchmarks.config_bench.case import LOSS, MODEL, STEADY, TRAIN, Case, Edit

_LOG = "            done += 1\n"
HARMLESS = (
    Case("run twice", "harmless", ""),
    Case("other paths", "harmless", "", moved=True),
    Case("other run name", "harmless", "", arguments=("--run-name", "another")),
    Case(
        "more log output",
        "harmless",
        "",
        variables={"LOGLEVEL": "DEBUG", "NCCL_DEBUG": "INFO"},
        edits=(
            Edit(
                TRAIN,
                _LOG,
                f'{_LOG}            log.info("step %d loss %s", done, loss.item())\n            print("step", done)\n',
            ),
        ),
    ),
    Case(
        "another host", "harmless", "", variables={"HOSTNAME": "node7", "HOST": "node7"}, base_variables={"HOSTNAME": "node1"}
    ),
    Case("another user", "harmless", "", variables={"USER": "b", "LOGNAME": "b", "HOME": "/tmp", "MAIL": "/var/mail/b"}),
    Case(
        "another terminal and job",
        "harmless",
        "",
        variables={
            "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22",
            "SSH_TTY": "/dev/pts/1",
            "TERM": "xterm",
            "SLURM_JOB_ID": "7",
            "PWD": "/somewhere",
            "OLDPWD": "/else",
            "COLUMNS": "80",
            "TMUX": "/tmp/tmux",
        },
    ),
    Case("another PYTHONPATH", "harmless", "", variables={"PYTHONPATH": "/opt/nothing"}),
    Case(
        "comments",
        "harmless",
        "",
        edits=(
            Edit(TRAIN, "    seed_everything()\n", "    # begin with the same seeds\n    seed_everything()  # all four\n"),
            Edit(MODEL, '"""A two-layer language model."""', '"""A language model of two layers.\n\nSee the paper.\n"""'),
            Edit(
                LOSS, "def token_loss(logits, labels):\n", 'def token_loss(logits, labels):\n    """Mean over all tokens."""\n'
            ),
        ),
    ),
    Case(
        "formatting",
        "harmless",
        "",
        edits=(
            Edit(
                MODEL,
                "self.qkv = nn.Linear(WIDTH, 3 * WIDTH)",
                "self.qkv = nn.Linear(\n            WIDTH,\n            (3 * WIDTH),\n        )\n",
            ),
            Edit(TRAIN, '"--run-name", default="run"', "'--run-name',   default='run'"),
        ),
    ),
    Case("more loader workers", "harmless", "", base=STEADY, edits=(Edit(TRAIN, "num_workers=0", "num_workers=2"),)),
    Case("another output folder", "harmless", "", arguments=("--output-dir", "elsewhere")),
)
