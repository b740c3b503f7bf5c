"""The programs: what each is, how it is started, how many steps it makes, and what is truly to be found in it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """A training program that comes with a package, or a short script of ours that calls a package's own training loop.

    package: what it comes with, as `name==version`, where it is not the first one of `start`. start: script and arguments;
    {data}, {site}, {sources} and {here} stand for folders. updates: steps of torch's optimizers that it makes, as counted from
    outside; None where that varies. steps: steps that trainprobe has to record; by default as many. why: why that differs.
    findings: what may be found because it is true: rule, words of the message, reason. threads: losses come in any order.
    amiss: what trainprobe does not do right yet; the test fails once it does. own: it needs other releases than the rest, and
    has an environment of its own, `make test-foreign-NAME`.
    """

    name: str
    package: str
    style: str
    start: str
    updates: int
    steps: int | None = None
    why: str = ""
    findings: tuple[tuple[str, str, str], ...] = ()
    quick: bool = False
    vision: bool = False
    launcher: bool = False  # started by a command of its own, such as torchrun, and not by Python
    threads: bool = False
    amiss: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    path: str = ""  # goes to PYTHONPATH
    own: bool = False

    @property
    def recorded(self) -> int:
        """How many steps trainprobe has to record, over all models and processes."""
        return self.updates if self.steps is None else self.steps

    @property
    def entry(self) -> str:
        """What runs, for a reader: the file inside the package, or the script here."""
        words = [word for word in self.start.split() if "/" in word or "." in word]
        return words[0].replace("{here}/", "tests/foreign/programs/").replace("{sources}/", "").replace("{site}/", "")


OF_TRL = (
    "--output_dir out --max_steps 30 --per_device_train_batch_size 4 --report_to none --use_cpu --bf16 False"
    " --logging_steps 5 --save_strategy no"
)
UNUSED_POOLER = (
    "reached_parameters",
    "pooler",
    "the encoder's pooler runs, the optimizer holds it, and mean pooling makes no use of what it returns",
)

RISING = ("drift", "loss has crept up", "the loss of such a learner does rise, with the values that it learns")

PROGRAMS = (
    # ---- quick: they need little to be installed and a few seconds each -----------------------------------------------------
    Program(
        "torchopt_meta",
        "torchopt==0.7.3",
        "differentiable inner steps (MAML); no optimizer of torch's own",
        "{here}/torchopt_meta.py",
        updates=0,
        steps=0,
        why="no optimizer of torch.optim takes part, and the weights are set back after each iteration",
    ),
    Program(
        "ignite_supervised",
        "pytorch-ignite==0.5.5",
        "event engine, accumulation, averaged copy, schedule",
        "{here}/ignite_supervised.py",
        updates=60,
        quick=True,
    ),
    Program(
        "opacus_functorch",
        "opacus==1.6.0",
        "differential privacy, per-sample gradients by vmap and grad",
        "{here}/opacus_private.py functorch",
        updates=32,
        quick=True,
    ),
    Program(
        "pyro_svi",
        "pyro-ppl==1.9.2",
        "variational inference, one optimizer for each parameter",
        "{here}/pyro_svi.py",
        updates=600,
        steps=300,
        why="two optimizers step in each iteration; one of the guide's two modules is watched, as the end of the run says",
    ),
    Program(
        "sb3_dqn",
        "stable-baselines3==2.9.2",
        "reinforcement learning off policy, target network",
        "{here}/sb3_dqn.py",
        updates=725,
        findings=(RISING,),
        quick=True,
    ),
    Program(
        "lightning_manual",
        "lightning==2.6.6",
        "manual optimization of Lightning's demo model",
        "{here}/lightning_manual.py",
        updates=20,
        quick=True,
    ),
    Program(
        "keras_fit",
        "keras==3.15.1",
        "Keras's own loop and optimizers on PyTorch",
        "{here}/keras_fit.py",
        updates=0,
        steps=48,
        why="updates of Keras's own optimizer",
        quick=True,
        environment={"KERAS_BACKEND": "torch"},
    ),
    Program(
        "snntorch_bptt",
        "snntorch==1.0.0",
        "spiking neurons, state kept in modules",
        "{here}/snntorch_bptt.py",
        updates=24,
        quick=True,
    ),
    Program(
        "sb3_sac",
        "stable-baselines3==2.9.2",
        "actor, critic and temperature: three optimizers, averaged critic",
        "{here}/sb3_sac.py",
        updates=1200,
        findings=(RISING,),
        steps=400,
        why="three optimizers step in each iteration",
    ),
    Program(
        "accelerate_script",
        "accelerate==1.15.0",
        "a dozen trainings in one process, bf16 and fp16 paths",
        "{site}/accelerate/test_utils/scripts/test_script.py",
        updates=120,
        steps=84,
        why="each of its ten trainings of 12 steps is watched, from the fifth update on where another was before it",
        quick=True,
    ),
    Program(
        "accelerate_sync",
        "accelerate==1.15.0",
        "accumulation with no_sync, two models side by side",
        "{site}/accelerate/test_utils/scripts/test_sync.py",
        updates=8,
        steps=4,
        why="nothing updates the first model; of two that step side by side one is watched, from its second update on",
    ),
    Program(
        "opacus_hooks",
        "opacus==1.6.0",
        "differential privacy, per-sample gradients by hooks",
        "{here}/opacus_private.py hooks",
        updates=32,
        quick=True,
    ),
    # ---- whole programs that come with a package -----------------------------------------------------------------------
    Program(
        "accelerate_sync_2",
        "accelerate==1.15.0",
        "DDP of two gloo processes under torchrun, uneven inputs",
        "torchrun --nproc_per_node 2 {site}/accelerate/test_utils/scripts/test_sync.py",
        updates=10,
        steps=4,
        why="as in accelerate_sync, two steps on each rank",
        findings=(
            ("distinct_data", "train on the same data", "a model beside that of DDP gets the gathered batch on both ranks"),
        ),
        launcher=True,
        environment={"ACCELERATE_USE_CPU": "true"},
    ),
    Program(
        "trl_sft",
        "trl==1.16.0",
        "supervised fine-tuning with accumulation",
        "{site}/trl/scripts/sft.py --model_name_or_path {data}/tinylm --dataset_name {data}/sft"
        f" --gradient_accumulation_steps 2 {OF_TRL}",
        updates=30,
    ),
    Program(
        "trl_sft_lora",
        "trl==1.16.0",
        "adapters by PEFT: most parameters frozen",
        "{site}/trl/scripts/sft.py --model_name_or_path {data}/tinylm --dataset_name {data}/sft"
        f" {OF_TRL} --use_peft --lora_r 4 --lora_target_modules q_proj v_proj",
        updates=30,
    ),
    Program(
        "trl_dpo",
        "trl==1.16.0",
        "frozen reference and policy, pairwise loss",
        f"{{site}}/trl/scripts/dpo.py --model_name_or_path {{data}}/tinylm --dataset_name {{data}}/pref {OF_TRL}",
        updates=30,
    ),
    Program(
        "trl_reward",
        "trl==1.16.0",
        "a new head, pairwise loss",
        f"{{site}}/trl/scripts/reward.py --model_name_or_path {{data}}/tinylm --dataset_name {{data}}/prefi {OF_TRL}",
        updates=30,
    ),
    Program(
        "trl_kto",
        "trl==1.16.0",
        "reference model, unpaired labels",
        f"{{site}}/trl/scripts/kto.py --model_name_or_path {{data}}/tinylm --dataset_name {{data}}/kto {OF_TRL}",
        updates=30,
    ),
    Program(
        "trl_grpo",
        "trl==1.16.0",
        "generation in the loop; every loss and gradient is exactly 0",
        "{site}/trl/scripts/grpo.py --model_name_or_path {data}/tinylm --dataset_name {data}/promptc"
        f" --reward_funcs think_format_reward --num_generations 4 --max_completion_length 8 {OF_TRL}",
        updates=30,
        findings=(
            ("dead", "have been zero", "all rewards are equal, so every gradient is exactly 0"),
            ("rollout", "equal rewards", "the reward function finds no answer in the wanted form"),
        ),
    ),
    Program(
        "cleanrl_dqn",
        "cleanrl==1.2.0",
        "a plain script: own loop, target network, replay buffer",
        "{sources}/cleanrl-1.2.0/cleanrl/dqn.py --total-timesteps 3000 --learning-starts 500 --cuda False",
        updates=249,
        findings=(RISING,),
    ),
    Program(
        "schedulefree_mnist",
        "schedulefree==1.4.1",
        "an optimizer that is switched to train() and eval()",
        "{sources}/schedulefree-1.4.1/examples/mnist/main.py --epochs 2 --no-cuda --batch-size 64",
        updates=40,
        vision=True,
    ),
    Program(
        "opacus_mnist",
        "opacus==1.6.0",
        "private training, the size of the batch changes",
        "{sources}/opacus-1.6.0/examples/mnist.py --device cpu --epochs 1 --lr .1 --batch-size 64 --data-root {data}",
        updates=20,
        vision=True,
    ),
    Program(
        "opacus_lstm",
        "opacus==1.6.0",
        "private training of an LSTM made of cells",
        "{sources}/opacus-1.6.0/examples/char-lstm-classification.py --device cpu --epochs 2 --batch-size 32 --hidden-size 16"
        " --data-root {data}/names",
        updates=10,
    ),
    Program(
        "opacus_dcgan",
        "opacus==1.6.0",
        "adversaries, two optimizers, in-place activations",
        "{sources}/opacus-1.6.0/examples/dcgan.py --disable-dp --device cpu --epochs 1 --ngf 8 --ndf 8 --batch-size 16"
        " --workers 0 --manualSeed 1 --data-root {data} --outf .",
        updates=16,
        steps=8,
        why="two optimizers step in each iteration",
        vision=True,
    ),
    Program(
        "fairscale_oss",
        "fairscale==0.4.13",
        "two spawned processes, DDP, sharded optimizer state",
        "{sources}/fairscale-0.4.13/benchmarks/oss.py --cpu --optim_type oss_ddp --model resnet18 --epochs 1 --batch_size 64",
        updates=20,
        vision=True,
        path="{sources}/fairscale-0.4.13",
        environment={"TMPDIR": "{data}"},
    ),
    Program(
        "e3nn_tetris",
        "e3nn==0.6.0",
        "equivariant net, scripted sub-modules, one batch",
        "{sources}/e3nn-0.6.0/examples/tetris.py",
        updates=300,
    ),
    Program(
        "gpytorch_regression",
        "gpytorch==1.15.2",
        "many small Gaussian processes, each with an optimizer of its own",
        "-m unittest -q test.examples.test_simple_gp_regression",
        updates=255,
        steps=235,
        why="each of the five trainings of 51 steps is watched, from the fifth or sixth update on where another was before it",
        path="{sources}/gpytorch-1.15.2",
    ),
    Program(
        "gpytorch_deep",
        "gpytorch==1.15.2",
        "deep Gaussian process in mini-batches",
        "-m unittest -q test.examples.test_dspp_regression",
        updates=100,
        path="{sources}/gpytorch-1.15.2",
    ),
    Program(
        "openclip",
        "open_clip_torch==3.3.0",
        "two towers, features kept and computed again, warm-up from a rate of zero",
        "-m open_clip_train.main --dataset-type synthetic --train-num-samples 16 --batch-size 4 --epochs 1 --workers 0"
        " --model ViT-S-32-alt --device cpu --precision fp32 --logs out --warmup 2 --accum-freq 2 --save-frequency 0",
        updates=2,
        vision=True,
    ),
    Program(
        "torch_rpc",
        "torch==2.13.0",
        "parameter server over RPC, gradients set by hand, four processes",
        "{here}/rpc.py",
        updates=4,
        threads=True,
    ),
    Program(
        "olmo_core",
        "ai2-olmo-core==3.0.0",
        "OLMo-core's trainer: two micro-batches, clipping, metrics that it gathers itself",
        "{here}/olmo_trainer.py",
        updates=13,
        steps=12,
        why="a step before the first loss makes the state of the optimizer",
    ),
    Program(
        "ms_swift",
        "ms-swift==4.6.0",
        "its command for fine-tuning, over Hugging Face's trainer; accumulation",
        "-m swift.cli.sft --model {data}/tinylm --model_type llama --template dummy --dataset {data}/sft/train.jsonl"
        " --tuner_type full --torch_dtype float32 --max_steps 10 --per_device_train_batch_size 2"
        " --gradient_accumulation_steps 2 --output_dir out --report_to none --split_dataset_ratio 0 --dataset_num_proc 1"
        " --dataloader_num_workers 0 --save_strategy no",
        updates=10,
    ),
    Program(
        "axolotl",
        "axolotl==0.19.0",
        "its command for fine-tuning, over Hugging Face's trainer; accumulation",
        "-m axolotl.cli.train {here}/axolotl.yaml --base_model={data}/tinylm",
        updates=10,
        environment={"AXOLOTL_DO_NOT_TRACK": "1"},
        own=True,
    ),
    # ---- loops of other packages, called by a short script ----------------------------------------------------------------
    Program(
        "lightning_language",
        "lightning==2.6.6",
        "transformer, then LSTM, accumulation",
        "{here}/lightning_language.py",
        updates=24,
        findings=(
            ("blow_up", "the loss rose", "the loss of the LSTM does rise, from 1.1 to 1446, at the demo's learning rate"),
        ),
    ),
    Program(
        "peft_lora",
        "peft==0.21.2",
        "adapters in a loop of one's own, gradient checkpointing, warm-up from a rate of zero",
        "{here}/peft_lora.py",
        updates=60,
    ),
    Program("hf_resume", "transformers==5.23.0", "evaluation in between, a resume", "{here}/hf_resume.py", updates=30),
    Program(
        "sentence_transformers",
        "sentence-transformers==6.2.0",
        "in-batch negatives, several forwards a loss",
        "{here}/sentence_transformers_pairs.py",
        updates=25,
        findings=(UNUSED_POOLER,),
    ),
    Program(
        "setfit",
        "setfit==1.2.0",
        "contrastive by Hugging Face's Trainer, then a loop of its own",
        "{here}/setfit_two_phases.py",
        updates=18,
        steps=17,
        why="the second phase is known from its first update on",
        findings=(UNUSED_POOLER,),
    ),
    Program(
        "sb3_ppo",
        "stable-baselines3==2.9.2",
        "reinforcement learning on policy",
        "{here}/sb3_ppo.py",
        updates=128,
        findings=(RISING,),
    ),
    Program("tabnet", "pytorch-tabnet==4.1.0", "ghost batch norm, schedule, early stopping", "{here}/tabnet.py", updates=48),
    Program("skorch", "skorch==1.4.0", "`optimizer.step(closure)`, callbacks", "{here}/skorch_classifier.py", updates=65),
    Program(
        "fastai",
        "fastai==2.8.12",
        "one cycle with fastai's own optimizer class",
        "{here}/fastai_onecycle.py",
        updates=0,
        steps=45,
        why="updates of fastai's own optimizer",
    ),
    Program(
        "botorch",
        "botorch==0.18.1",
        "Gaussian process fitted by SciPy, then by Adam, in doubles",
        "{here}/botorch_fit.py",
        updates=50,
    ),
    Program(
        "metric_learning",
        "pytorch-metric-learning==2.9.0",
        "two models and a loss with weights: three optimizers",
        "{here}/metric_learning.py",
        updates=72,
        steps=24,
        why="three optimizers step in each iteration",
    ),
    Program(
        "ctgan",
        "ctgan==0.12.1",
        "adversaries with a gradient penalty",
        "{here}/ctgan_table.py",
        updates=32,
        steps=16,
        why="two optimizers step in each iteration",
    ),
    Program(
        "deepxde",
        "DeepXDE==1.15.0",
        "gradients of gradients, closures, Adam and then L-BFGS",
        "{here}/deepxde_poisson.py",
        updates=201,
        environment={"DDE_BACKEND": "pytorch"},
        findings=(("spike", "another optimizer took the place", "the rate of L-BFGS, 1, follows Adam's 0.001: a note"),),
    ),
    Program("sbi", "sbi==0.27.0", "normalizing flow", "{here}/sbi_snpe.py", updates=39),
    Program("monai", "monai==1.6.1", "segmentation, Dice loss", "{here}/monai_unet.py", updates=24),
    Program(
        "pykeen",
        "pykeen==1.11.1",
        "embeddings of a knowledge graph, dry run before the first step",
        "{here}/pykeen_transe.py",
        updates=35,
        findings=(
            (
                "untouched_between_steps",
                "entity_representations",
                "TransE scales its embeddings back to norm 1 after each update",
            ),
        ),
    ),
    Program("gluonts", "gluonts==0.17.0", "recurrent forecaster, likelihood loss", "{here}/gluonts_deepar.py", updates=20),
    Program("neuralforecast", "neuralforecast==3.3.0", "two models in a row", "{here}/neuralforecast_two.py", updates=30),
    Program(
        "pytorch_forecasting",
        "pytorch-forecasting==1.8.0",
        "attention, LSTM, gates, clipping",
        "{here}/pytorch_forecasting_tft.py",
        updates=10,
        findings=(
            (
                "reached_parameters",
                "static_context_variable_selection",
                "with a single input variable, the selection network has nothing to select by its context",
            ),
        ),
    ),
    Program(
        "ultralytics",
        "ultralytics==8.4.190",
        "warm-up of rate and momentum, accumulation, averaged model",
        "{here}/ultralytics_classify.py",
        updates=2,
        vision=True,
    ),
    Program(
        "ddpm",
        "denoising-diffusion-pytorch==2.3.4",
        "diffusion, averaged model, accumulation, samples in between",
        "{here}/ddpm.py",
        updates=12,
        vision=True,
    ),
)
