"""Differences that people reported in public threads, planted before the comparison was looked at.

Each case names the thread that it was taken from; the training is the one of `planted.py`.
"""

from __future__ import annotations

from benchmarks.config_bench.case import DATA, LOSS, MODEL, STEADY, TRAIN, Case, Edit, edit, variable

_EVERY_SECOND = Edit(TRAIN, "done % 1 == 0", "done % 2 == 0")
_WORKERS = (Edit(TRAIN, "num_workers=0", "num_workers=2"),)
_STEP = "StepLR(optimizer, step_size=2, gamma=0.9)"
_UPDATE = "                scaler.update()\n                optimizer.zero_grad()\n                scheduler.step()\n"
_SEEDED = "    seed_everything()\n    model = Model()\n    model = prepare(model)\n"


def _ramp(steps: int) -> Edit:
    ramp = f"torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters={steps})"
    return Edit(TRAIN, _STEP, ramp)


THREADS = (
    # huggingface/transformers 35207, hiyouga/LlamaFactory 7443
    edit(
        "loss not divided by accumulation", "loss", TRAIN, "scale(loss)", "scale(loss / 2)", r"main in train", (_EVERY_SECOND,)
    ),
    # huggingface/trl 2175
    Case(
        "two micro-batches instead of one batch",
        "loss",
        r"batch size differs: 4 and 2|accumulation",
        (Edit(TRAIN, "batch_size=4", "batch_size=2"), _EVERY_SECOND),
    ),
    # meta-pytorch/torchtune 1875
    edit("labels padded with a token", "loss", DATA, "length), -100)", "length), PAD)", r"labels|collate in data"),
    # keras-team/keras 16645
    edit("loss in the model's type", "loss", LOSS, ".flatten(0, 1).float()", ".flatten(0, 1)", r"token_loss in loss"),
    # pytorch/pytorch 7068
    edit("numpy unseeded in workers", "data", DATA, "    np.random.seed(200 + worker)\n", "", r"seed_worker in data", _WORKERS),
    # pytorch/pytorch 15170
    edit("other number of workers", "data", TRAIN, "num_workers=2", "num_workers=3", r"workers differs: 2 and 3", _WORKERS),
    # mlfoundations/open_clip 734
    Case(
        "own generator that nobody seeds",
        "data",
        r"another order|random\.Random|never seeded|not seeded",
        base=(*STEADY, Edit(DATA, ".splitlines()", ".splitlines()\n        random.Random().shuffle(self.lines)")),
    ),
    # torchgeo/torchgeo 1918
    Case(
        "order of a set",
        "data",
        r"PYTHONHASHSEED.*1 and 2|another order",
        base=(*STEADY, Edit(DATA, "file.read().splitlines()", "list(set(file.read().splitlines()))")),
        base_variables={"PYTHONHASHSEED": "1"},
        variables={"PYTHONHASHSEED": "2"},
    ),
    # AlexeyAB/darknet 1403
    edit(
        "end of text added",
        "data",
        DATA,
        "torch.tensor(encode(text)[:LONGEST])",
        "torch.tensor([*encode(text)[: LONGEST - 1], 2])",
        r"input_ids|Lines\.__getitem__ in data",
    ),
    # tensorflow/tensorflow 50244
    edit(
        "initialization of another release",
        "weights",
        MODEL,
        "nn.init.normal_(p, std=0.05)",
        "nn.init.xavier_normal_(p)",
        r"normal_ .* in Model\.__init__",
    ),
    # microsoft/Semi-supervised-learning 63
    Case(
        "seeded after the model was made",
        "weights",
        r"weights differ from the start|main in train|before",
        (Edit(TRAIN, _SEEDED, "    model = Model()\n    seed_everything()\n    model = prepare(model)\n"),),
    ),
    # huggingface/transformers: keys that a checkpoint lacks are newly initialized
    edit(
        "head newly initialized",
        "weights",
        TRAIN,
        "    return model\n",
        "    torch.nn.init.normal_(model.head.weight, std=0.05)\n    return model\n",
        r"head\.weight|normal_",
    ),
    # huggingface/transformers 28134
    Case(
        "schedule of more epochs",
        "schedule",
        r"total.iters differs: 10 and 30|learning rate",
        (Edit(TRAIN, "total_iters=10", "total_iters=30"),),
        base=(_ramp(10),),
    ),
    # lightning: scheduler stepped once an epoch
    Case(
        "scheduler stepped each epoch",
        "schedule",
        r"learning rate",
        (
            Edit(TRAIN, _UPDATE, _UPDATE.replace("                scheduler.step()\n", "")),
            Edit(TRAIN, "    checker.close()\n", "        scheduler.step()\n    checker.close()\n"),
        ),
    ),
    # pytorch/pytorch 20124: scheduler before optimizer
    Case(
        "scheduler stepped first",
        "schedule",
        r"learning rate",
        (
            Edit(TRAIN, _UPDATE, _UPDATE.replace("                scheduler.step()\n", "")),
            Edit(
                TRAIN,
                "                scaler.step(optimizer)\n",
                "                scheduler.step()\n                scaler.step(optimizer)\n",
            ),
        ),
    ),
    # a random call more before training (sanity checks, graphs for TensorBoard)
    edit(
        "one random call more",
        "randomness",
        TRAIN,
        "    model.train()\n",
        "    torch.randn(2, 3)\n    model.train()\n",
        r"randn.* 0 times and 1",
    ),
    # Dao-AILab/flash-attention: dropout within attention
    edit(
        "dropout in attention",
        "code",
        MODEL,
        "attn_mask=mask[:, None, None, :].bool())",
        "attn_mask=mask[:, None, None, :].bool(), dropout_p=0.1)",
        r"scaled_dot_product_attention p=0\.1 is called 0 times and 8 times",
    ),
    # attention without the mask of padding
    edit("mask lost", "code", MODEL, "attn_mask=mask[:, None, None, :].bool()", "attn_mask=None", r"Block\.attend in model"),
    # pytorch/pytorch: eps of optimizer and norm from a converted configuration
    edit(
        "norm of another class",
        "code",
        MODEL,
        "self.norm = nn.LayerNorm(WIDTH)",
        "self.norm = nn.RMSNorm(WIDTH)",
        r"module norm differs: LayerNorm\(.* and RMSNorm",
    ),
    edit(
        "head without bias",
        "code",
        MODEL,
        "nn.Linear(WIDTH, VOCABULARY)",
        "nn.Linear(WIDTH, VOCABULARY, False)",
        r"bias of Linear in module head differs: True and False",
    ),
    # unscaling left out before clipping
    edit("clipped while scaled", "loop", TRAIN, "                scaler.unscale_(optimizer)\n", "", r"unscale|main in train"),
    # gradients of one micro-batch more than the optimizer sees
    edit(
        "cleared before the step",
        "loop",
        TRAIN,
        "scaler.step(optimizer)",
        "optimizer.zero_grad() or scaler.step(optimizer)",
        r"main in train",
    ),
    # two machines, two processors
    variable("ATEN_CPU_CAPABILITY", "default"),
    variable("MKL_CBWR", "COMPATIBLE"),
    # ultralytics/ultralytics 5034
    Case(
        "opencv of another release",
        "packages",
        r"opencv-python(-headless)? differs: 4\.6\.0\.66 and 4\.8\.0\.76",
        base_distributions={"opencv_python": "4.6.0.66"},
        distributions={"opencv_python": "4.8.0.76"},
    ),
    # NVIDIA/TransformerEngine
    variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", base="1"),
)
THREADS_HARMLESS = (
    Case(
        "other variables of a cluster",
        "harmless",
        "",
        variables={"SLURM_JOB_ID": "2", "SLURM_NODELIST": "n02", "POD_NAME": "b"},
        base_variables={"SLURM_JOB_ID": "1", "SLURM_NODELIST": "n01", "POD_NAME": "a"},
    ),
    Case(
        "other cache folders",
        "harmless",
        "",
        variables={"HF_HOME": "/b", "TORCH_HOME": "/b", "XDG_CACHE_HOME": "/b"},
        base_variables={"HF_HOME": "/a", "TORCH_HOME": "/a", "XDG_CACHE_HOME": "/a"},
    ),
    edit(
        "progress printed",
        "harmless",
        TRAIN,
        "            done += 1\n",
        '            done += 1\n            print("step", done)\n',
        "",
    ),
    Case(
        "logging service offline",
        "harmless",
        "",
        variables={"WANDB_MODE": "offline", "WANDB_PROJECT": "b"},
        base_variables={"WANDB_PROJECT": "a"},
    ),
)
