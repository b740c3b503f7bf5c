"""The planted differences: one each, named as a person would name it."""

from __future__ import annotations

from benchmarks.config_bench.case import CORPUS, DATA, LOSS, MODEL, STEADY, TRAIN, Case, Edit, edit, variable

_MAIN = "    seed_everything()\n    model = Model()\n"
_REVERSED, _SHUFFLED = ".splitlines()[::-1]", ".splitlines()\n        random.shuffle(self.lines)"
_COMPILED = (Edit(TRAIN, "    return model\n", '    return torch.compile(model, backend="eager")\n'),)
_WORKERS = (Edit(TRAIN, "num_workers=0", "num_workers=2"),)
_PARALLEL = (
    Edit(
        TRAIN,
        "    return model\n",
        "    store = torch.distributed.HashStore()\n"
        '    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)\n'
        "    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=25)\n",
    ),
)


def _switch(name: str, line: str, names: str) -> Case:
    """Return the case of one statement that is carried out before the model is made."""
    return edit(name, "switches", TRAIN, _MAIN, f"    {line}\n{_MAIN}", names)


def _prepared(name: str, group: str, line: str, names: str) -> Case:
    """Return the case of one statement that is carried out on the model before it trains."""
    return edit(name, group, TRAIN, "    return model\n", f"    {line}\n    return model\n", names)


SEEDS = (
    edit("python seed", "seeds", TRAIN, "random.seed(11)", "random.seed(21)", r"seed of (random|python).*11 and 21"),
    edit("numpy seed", "seeds", TRAIN, "np.random.seed(12)", "np.random.seed(22)", r"seed of numpy.*12 and 22"),
    edit("torch seed", "seeds", TRAIN, "torch.manual_seed(13)", "torch.manual_seed(23)", r"seed of torch.*13 and 23"),
    edit("cuda seed", "seeds", TRAIN, "manual_seed_all(14)", "manual_seed_all(24)", r"seed of torch\.cuda.*14 and 24"),
    edit(
        "generator seed",
        "seeds",
        TRAIN,
        "generator.manual_seed(5)",
        "generator.manual_seed(6)",
        r"seed of .*[Gg]enerator.*5 and 6",
    ),
    edit("numpy never seeded", "seeds", TRAIN, "    np.random.seed(12)\n", "", r"numpy\.random\.seed.*1 time and 0"),
    edit("loader without generator", "seeds", TRAIN, "        generator=generator,\n", "", r"loader generator"),
    edit(
        "worker seeds",
        "seeds",
        DATA,
        "random.seed(100 + worker)",
        "random.seed(101 + worker)",
        r"seed_worker in data",
        _WORKERS,
    ),
    edit(
        "other worker function",
        "seeds",
        TRAIN,
        "worker_init_fn=seed_worker",
        "worker_init_fn=None",
        r"worker_init_fn differs",
        _WORKERS,
    ),
)
DATA_CASES = (
    edit("order of lines", "data", DATA, ".splitlines()", _REVERSED, r"^[^;]*another order", STEADY),
    edit("order of lines that are augmented", "data", DATA, ".splitlines()", _REVERSED, r"Lines\.__init__ in data"),
    edit("lines shuffled once more", "data", DATA, ".splitlines()", _SHUFFLED, r"^[^;]*another order", STEADY),
    edit("augmented lines shuffled once more", "data", DATA, ".splitlines()", _SHUFFLED, r"random\.shuffle.* 0 times and 1"),
    edit("not shuffled", "data", TRAIN, "shuffle=True", "shuffle=False", r"shuffling differs"),
    edit(
        "one line is another",
        "data",
        CORPUS,
        "jackdaws love my",
        "jackdaws hate my",
        r"sample(s|) (is|are) replaced in input_ids",
    ),
    edit("one line more", "data", CORPUS, "glib jocks", "a line more\nglib jocks", r"18 and 19"),
    edit(
        "first batch skipped",
        "data",
        TRAIN,
        "        for batch in loader:\n",
        "        for batch in list(loader)[1:]:\n",
        r"micro-step (earlier|later)",
    ),
    edit(
        "labels not shifted",
        "data",
        DATA,
        "labels[row, : len(tokens) - 1] = tokens[1:]",
        "labels[row, : len(tokens)] = tokens",
        r"labels differ|collate in data",
    ),
    edit("tokenizer keeps case", "data", DATA, "text.lower()", "text.swapcase()", r"input_ids|encode in data"),
    edit(
        "padding on the left",
        "data",
        DATA,
        "ids[row, : len(tokens)] = tokens",
        "ids[row, length - len(tokens) :] = tokens",
        r"other places|collate in data",
    ),
    edit("padding value", "data", DATA, "PAD = 0", "PAD = 1", r"padded with another value|top level of data"),
    edit(
        "padded to 64",
        "data",
        DATA,
        "    length = max(map(len, samples))\n",
        "    length = 64\n",
        r"padded to another length|collate in data",
    ),
    edit("truncation", "data", DATA, "LONGEST = 48", "LONGEST = 24", r"in shape|top level of data"),
    edit("batch size", "data", TRAIN, "batch_size=4", "batch_size=3", r"batch size differs: 4 and 3"),
    edit(
        "last batch dropped",
        "data",
        TRAIN,
        "drop_last=False",
        "drop_last=True",
        r"last batch.*false and true|drop_last.*false and true",
    ),
    edit("augmentation", "data", DATA, "random.random() >= 0.02", "random.random() >= 0.05", r"Lines\.__getitem__ in data"),
    edit(
        "worker count with random augmentation",
        "data",
        TRAIN,
        "num_workers=2",
        "num_workers=1",
        r"workers differs: 2 and 1",
        _WORKERS,
    ),
    edit(
        "data type of the mask",
        "data",
        DATA,
        "torch.zeros(len(samples), length)",
        "torch.zeros(len(samples), length, dtype=torch.long)",
        r"attention_mask",
    ),
)
WEIGHTS = (
    _prepared(
        "one weight nudged", "weights", "torch.nn.init.constant_(model.blocks[1].down.bias, 1e-3)", r"blocks\.1\.down\.bias"
    ),
    edit("initial deviation", "weights", MODEL, "std=0.05", "std=0.06", r"0\.05\b.*0\.06|weights differ from the start"),
    edit("a buffer", "weights", MODEL, "/ 10000 **", "/ 500000 **", r"positions"),
    _prepared("frozen embedding", "weights", "model.embed.weight.requires_grad_(False)", r"requires_grad of embed\.weight"),
    _prepared("bfloat16 weights", "weights", "model = model.to(torch.bfloat16)", r"float32 and bfloat16"),
    _prepared("tied head", "weights", "model.head.weight = model.embed.weight", r"weight head\.weight is only"),
)
SWITCHES = (
    edit("autocast off", "switches", TRAIN, "enabled=True", "enabled=False", r"autocast"),
    edit(
        "autocast dtype",
        "switches",
        TRAIN,
        "dtype=torch.bfloat16, enabled",
        "dtype=torch.float16, enabled",
        r"autocast.*bfloat16 and float16",
    ),
    edit(
        "autocast around the head missing",
        "switches",
        MODEL,
        "return self.head(self.norm(x))",
        'with torch.autocast("cpu", enabled=False):\n            return self.head(self.norm(x).float())',
        r"the code differs: .* in (model|train)\.py",
    ),
    _switch("default dtype", "torch.set_default_dtype(torch.float64)", r"default.dtype"),
    _switch("flash attention off", "torch.backends.cuda.enable_flash_sdp(False)", r"flash"),
    _switch("memory-efficient attention off", "torch.backends.cuda.enable_mem_efficient_sdp(False)", r"memory.efficient"),
    _switch("math attention off", "torch.backends.cuda.enable_math_sdp(False)", r"math"),
    _switch("cudnn.allow_tf32", "torch.backends.cudnn.allow_tf32 = False", r"cudnn.*tf32"),
    _switch("cudnn.benchmark", "torch.backends.cudnn.benchmark = True", r"cudnn.benchmark"),
    _switch("cudnn.deterministic", "torch.backends.cudnn.deterministic = True", r"cudnn.deterministic"),
    _switch("matmul.allow_tf32", "torch.backends.cuda.matmul.allow_tf32 = True", r"tf32|matmul precision"),
    _switch("matmul precision", 'torch.set_float32_matmul_precision("medium")', r"matmul precision.*highest and medium"),
    _switch("bf16 reduction", "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False", r"bf16.reduced"),
    _switch(
        "deterministic algorithms", "torch.use_deterministic_algorithms(True)", r"deterministic algorithms.*false and true"
    ),
    _switch("fast paths off", "torch.backends.mha.set_fastpath_enabled(False)", r"fast.?path"),
    _switch("threads", "torch.set_num_threads(2)", r"threads.*1 and 2"),
    _switch("mkldnn off", "torch.backends.mkldnn.set_flags(False)", r"mkldnn"),
    _switch("denormals flushed", "torch.set_flush_denormal(True)", r"denormal"),
    edit(
        "compiled",
        "switches",
        TRAIN,
        "    return model\n",
        '    return torch.compile(model, backend="aot_eager")\n',
        r"^[^;]*compile",
    ),
    edit(
        "compiled in place",
        "switches",
        TRAIN,
        "    return model\n",
        '    model.compile(backend="aot_eager")\n    return model\n',
        r"^[^;]*compile",
    ),
    edit("compiler backend", "switches", TRAIN, '"eager"', '"aot_eager"', r"compile.*=eager and backend=aot_eager", _COMPILED),
    edit(
        "one block compiled",
        "switches",
        TRAIN,
        "    return model\n",
        '    model.blocks[1].compile(backend="eager")\n    return model\n',
        r"compile",
    ),
)
OPTIMIZER = (
    edit("learning rate", "optimizer", TRAIN, "lr=0.01", "lr=0.02", r"learning rate differs: 0\.01 and 0\.02"),
    edit("betas", "optimizer", TRAIN, "betas=(0.9, 0.95)", "betas=(0.9, 0.999)", r"bet.*0\.95.*0\.999"),
    edit("eps", "optimizer", TRAIN, "eps=1e-8", "eps=1e-6", r"epsilon.*1e-8 and 1e-6"),
    edit(
        "weight decay",
        "optimizer",
        TRAIN,
        '"weight_decay": 0.1',
        '"weight_decay": 0.01',
        r"weight decay differs: 0\.1 and 0\.01",
    ),
    edit("amsgrad", "optimizer", TRAIN, "amsgrad=False", "amsgrad=True", r"amsgrad"),
    edit("foreach", "optimizer", TRAIN, "amsgrad=False", "amsgrad=False, foreach=True", r"foreach"),
    edit("fused", "optimizer", TRAIN, "amsgrad=False", "amsgrad=False, fused=True", r"fused"),
    edit(
        "class",
        "optimizer",
        TRAIN,
        "torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, amsgrad=False)",
        "torch.optim.Adam(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, amsgrad=False)",
        r"AdamW and Adam|decoupled",
    ),
    edit(
        "groups",
        "optimizer",
        TRAIN,
        'if not (n.endswith("bias") or "norm" in n)]\n    groups',
        'if not (n.endswith("bias") or "norm" in n) and "embed" not in n]\n    groups',
        r"parameters in group0",
    ),
    edit("schedule", "optimizer", TRAIN, "gamma=0.9", "gamma=0.5", r"gamma differs: 0\.9 and 0\.5|schedul"),
    edit(
        "schedule class",
        "optimizer",
        TRAIN,
        "StepLR(optimizer, step_size=2, gamma=0.9)",
        "torch.optim.lr_scheduler.LinearLR(optimizer)",
        r"StepLR and LinearLR|schedul",
    ),
    edit(
        "schedule not stepped",
        "optimizer",
        TRAIN,
        "                scheduler.step()\n",
        "",
        r"learning rate differs from optimizer step 2",
    ),
)
LOOP = (
    edit("clipping", "loop", TRAIN, "model.parameters(), 1.0)", "model.parameters(), 0.5)", r"clipping differs: 1 and 0\.5"),
    edit(
        "clipping missing",
        "loop",
        TRAIN,
        "                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "",
        r"clipping is only in bench",
    ),
    edit("clipping by value", "loop", TRAIN, "clip_grad_norm_(", "clip_grad_value_(", r"clip_grad_norm_ and clip_grad_value_"),
    edit("gradient accumulation", "loop", TRAIN, "done % 1", "done % 2", r"accumulation"),
    edit(
        "gradients never cleared",
        "loop",
        TRAIN,
        "                optimizer.zero_grad()\n",
        "",
        r"the code differs: main in train\.py",
    ),
    edit("loss scale", "loop", TRAIN, "init_scale=1024.0", "init_scale=65536.0", r"(loss|init).scale.*1024 and 65536"),
    edit(
        "loss scaler off", "loop", TRAIN, "init_scale=1024.0", "init_scale=1024.0, enabled=False", r"loss scale.* 1024 and off"
    ),
    edit(
        "loss halved",
        "loop",
        TRAIN,
        "scaler.scale(loss)",
        "scaler.scale(loss / 2)",
        r"the code differs: .* in (model|train)\.py",
    ),
    edit(
        "label smoothing",
        "loop",
        LOSS,
        "ignore_index=-100",
        "ignore_index=-100, label_smoothing=0.1",
        r"label.smoothing|code.*token_loss",
    ),
    edit("dropout", "loop", MODEL, "nn.Dropout(0.1)", "nn.Dropout(0.2)", r"dropout.*0\.1 and 0\.2"),
    edit("evaluation mode", "loop", TRAIN, "    model.train()\n", "    model.eval()\n", r"evaluation mode"),
    edit(
        "one block in evaluation mode",
        "loop",
        TRAIN,
        "    model.train()\n",
        "    model.train()\n    model.blocks[0].eval()\n",
        r"blocks\.0.*evaluation mode",
    ),
)
CODE = (
    edit(
        "activation",
        "code",
        MODEL,
        "functional.gelu(self.up(self.norm2(x)))",
        'functional.gelu(self.up(self.norm2(x)), approximate="tanh")',
        r"code.*Block\.forward",
    ),
    edit(
        "residual lost", "code", MODEL, "return x + self.drop(self.down", "return self.drop(self.down", r"code.*Block\.forward"
    ),
    edit("loss reduction", "code", LOSS, "ignore_index=-100", 'ignore_index=-100, reduction="sum"', r"code.*token_loss"),
    _prepared("forward hook", "code", "model.head.register_forward_hook(lambda m, a, y: y * 1.5)", r"head has a forward hook"),
    _prepared(
        "gradient hook", "code", "model.embed.weight.register_hook(lambda g: g * 2)", r"embed\.weight has a gradient hook"
    ),
    _prepared("forward replaced", "code", "model.blocks[0].drop.forward = lambda x: x * 0.9", r"blocks\.0\.drop"),
    edit(
        "epsilon of a norm",
        "code",
        MODEL,
        "self.norm1 = nn.LayerNorm(WIDTH)",
        "self.norm1 = nn.LayerNorm(WIDTH, eps=1e-3)",
        r"eps.*1e-0?5 and (0\.001|1e-0?3)",
    ),
)
PARALLEL = (
    edit("bucket size", "parallel", TRAIN, "bucket_cap_mb=25", "bucket_cap_mb=1", r"bucket", _PARALLEL),
    edit(
        "static graph", "parallel", TRAIN, "bucket_cap_mb=25", "bucket_cap_mb=25, static_graph=True", r"static.graph", _PARALLEL
    ),
    edit(
        "gradients as views",
        "parallel",
        TRAIN,
        "bucket_cap_mb=25",
        "bucket_cap_mb=25, gradient_as_bucket_view=True",
        r"bucket.view",
        _PARALLEL,
    ),
    edit(
        "unused parameters",
        "parallel",
        TRAIN,
        "bucket_cap_mb=25",
        "bucket_cap_mb=25, find_unused_parameters=True",
        r"unused.parameters",
        _PARALLEL,
    ),
)
VARIABLES = (
    variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    variable("NCCL_ALGO", "Ring", base="Tree"),
    variable("NCCL_DETERMINISTIC", "1"),
    variable("HCCL_DETERMINISTIC", "true"),
    variable("CLOSE_MATMUL_K_SHIFT", "1"),
    variable("FLASH_ATTENTION_DETERMINISTIC", "1"),
    variable("NVIDIA_TF32_OVERRIDE", "0"),
    variable("PYTHONHASHSEED", "1", base="0"),
    variable("OMP_NUM_THREADS", "2", r"OMP_NUM_THREADS|threads"),
    variable("MY_EXPERIMENT_FLAG", "b", base="a"),
    Case(
        "variable that the script reads",
        "variables",
        "MY_LOSS_WEIGHT",
        base=(Edit(TRAIN, "scaler.scale(loss)", 'scaler.scale(loss * float(os.environ.get("MY_LOSS_WEIGHT", "1")))'),),
        variables={"MY_LOSS_WEIGHT": "2"},
    ),
)
PACKAGES = (
    Case(
        "flash-attn",
        "packages",
        r"flash-attn differs: 2\.6\.3 and 2\.7\.0",
        base_distributions={"flash_attn": "2.6.3"},
        distributions={"flash_attn": "2.7.0"},
    ),
    Case("a package on one side", "packages", r"my-kernels", distributions={"my_kernels": "0.1"}),
)
PLANTED = (*SEEDS, *DATA_CASES, *WEIGHTS, *SWITCHES, *OPTIMIZER, *LOOP, *CODE, *PARALLEL, *VARIABLES, *PACKAGES)
