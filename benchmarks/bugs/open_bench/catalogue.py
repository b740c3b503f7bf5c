"""The bugs of the open bench: where each comes from, when it begins to do harm, and what must be named first."""

from __future__ import annotations

from benchmarks.bugs.open_bench import generative, ranks, reinforcement, text, trainers, vision
from benchmarks.bugs.open_bench.bug import OpenBug as Bug

WEIGHTS = r".*(weight|bias)"
LOSS = r"loss(/.*)?"
RATE = r"lr(/.*)?|.*learning.rate.*"
BATCH = r"batch(/.*)?|.*(input|target|label).*"
RUNNING = r".*(running_mean|running_var|num_batches_tracked)"

OPEN: tuple[Bug, ...] = (
    # ---- data -------------------------------------------------------------------------------------------------------
    Bug("divided_by_255_twice", "data", "4uiiurz1/pytorch-nested-unet#62", vision.mnist, 0, f"{BATCH}|conv1.*", "input"),
    Bug("not_shuffled", "data", "Deci-AI/super-gradients#416", vision.mnist, 0, f"{BATCH}|fc2.*", "target|label|class"),
    Bug("workers_draw_alike", "data", "pytorch/pytorch#5059", vision.crops, 1, f"{BATCH}|random state", "batch"),
    Bug("end_token_is_padding", "data", "huggingface/transformers#23530", trainers.causal_lm, 1,
        f"{BATCH}|.*wte.*|.*lm_head.*", "target|label|class"),
    Bug("labels_shifted_twice", "data", "GanjinZero/RRHF#49", trainers.causal_lm, 1, f"{BATCH}|{LOSS}", "label|target|shift"),
    Bug("padding_is_a_target", "data", "01-ai/Yi#110", trainers.causal_lm, 1, f"{BATCH}|{LOSS}", "label|target|padding|mask"),
    Bug("padding_mask_inverted", "data", "pytorch/pytorch#39321", text.sentiment, 0, rf"{BATCH}|encoder.*", "mask|padding"),
    Bug("batch_taken_for_time", "data", "AndersonJo/dqn-pytorch#1", text.frames, 0, rf"{BATCH}|lstm.*"),
    Bug("transcripts_too_long", "data", "wenet-e2e/wenet#2299", text.speech, 0, f"{BATCH}|{LOSS}", "infinit|too short|length"),
    Bug("self_loops_twice", "data", "dmlc/dgl#482", text.citations, 0, rf"{BATCH}|conv.*|adjacency"),
    # ---- the loss ---------------------------------------------------------------------------------------------------
    Bug("double_softmax", "loss", "illiterate/BertClassifier#2", vision.mnist, 0, f"{LOSS}|last|fc2.*", "softmax|logits"),
    Bug("relu_on_logits", "loss", "forresti/SqueezeNet#10", vision.mnist, 0, f"{LOSS}|last|fc2.*", "logits"),
    Bug("compared_with_itself", "loss", "Lightning-Universe/lightning-bolts#695", generative.contrast, 0,
        f"{LOSS}|projector.*", "logits|target"),
    Bug("divergence_of_probabilities", "loss", "microsoft/ProDA#20", generative.distill, 0, f"{LOSS}", "kl_div|log"),
    Bug("teacher_twice", "loss", "labmlai/annotated_deep_learning_paper_implementations#66", generative.distill, 0,
        rf"{LOSS}|teacher.*", "kl_div|gradient"),
    Bug("advantage_broadcast", "loss", "PacktPublishing/Deep-Reinforcement-Learning-Hands-On#74", reinforcement.a2c, 0,
        rf"{LOSS}|critic.*|advantage.*", "broadcast|shape"),
    Bug("ratio_always_one", "loss", "AI4Finance-Foundation/ElegantRL#243", reinforcement.ppo, 0, f"ratio|{LOSS}", "ratio"),
    # ---- gradients --------------------------------------------------------------------------------------------------
    Bug("sampled_without_gradient", "gradients", "pytorch/pytorch#4620", generative.vae, 0, r"fc1.*|fc2[12].*", "sampl"),
    Bug("fake_not_detached", "gradients", "heykeetae/Self-Attention-GAN#48", generative.gan, 0, r"generator.*"),
    Bug("target_not_detached", "gradients", "Farama-Foundation/Gymnasium#1494", reinforcement.a2c, 0, r"critic.*"),
    Bug("penalty_without_graph", "gradients", "ooples/AiDotNet#1844", trainers.wgan, 0, rf"critic.*|{LOSS}",
        "create_graph|detach"),
    Bug("ascent_gradient_kept", "gradients", "rollovd/LookSAM#3", vision.sharpness, 0, r"(conv|fc).*"),
    Bug("zero_grad_per_epoch", "gradients", "pytorch/pytorch#47175", vision.mnist, 1, r"(conv|fc).*"),
    Bug("tail_divided_by_all", "gradients", "Lightning-AI/pytorch-lightning#19987", trainers.regression, 3,
        rf"net.*|{LOSS}|grad_norm", "micro-batch"),
    Bug("clipped_before_the_backward_pass", "gradients", "simchowitzlabpublic/nano-world-model#22", trainers.regression, 0,
        r"grad_norm.*|net.*", "clip"),
    Bug("clipped_each_micro_batch", "gradients", "tenstorrent/tt-metal#17568", generative.diffusion, 0,
        r"grad_norm.*|(time|enter|middle|leave).*", "clip"),
    Bug("divided_by_the_engine_too", "gradients", "deepspeedai/Megatron-DeepSpeed#42", trainers.engine, 0,
        rf"{LOSS}|[02]\..*|grad_norm", "micro-batch|accumulat"),
    # ---- the optimizer ----------------------------------------------------------------------------------------------
    Bug("warm_up_without_end", "optimizer", "coqui-ai/TTS#1611", trainers.causal_lm, 2, RATE, "learning rate|warm"),
    Bug("only_last_group_decays", "optimizer", "rasbt/LLMs-from-scratch#692", vision.finetune, 1, RATE, "learning rate"),
    Bug("cosine_by_batch", "optimizer", "ivadomed/ivadomed#57", vision.imagenet, 1, RATE, "learning rate"),
    Bug("plateau_of_the_wrong_sign", "optimizer", "md-mohaiminul/ViS4mer#4", vision.tabular, 20, RATE, "learning rate"),
    Bug("schedulers_not_stepped", "optimizer", "voicepaw/so-vits-svc-fork#291", trainers.wgan, 2, RATE, "learning rate"),
    Bug("filled_with_a_constant", "optimizer", "HomericIntelligence/Mnemosyne#1987", vision.tabular, 0, r"[02]\..*"),
    Bug("adapter_loaded_frozen", "optimizer", "huggingface/peft#282", trainers.adapters, 1, r".*lora_.*"),
    Bug("average_without_buffers", "optimizer", "CuriousAI/mean-teacher#9", vision.imagenet, 12, rf"{RUNNING}|.*ema.*",
        "average"),
    # ---- modes ------------------------------------------------------------------------------------------------------
    Bug("frozen_statistics_move", "modes", "kdexd/virtex#16", vision.transfer, 0, rf"{RUNNING}|backbone.*"),
    Bug("teacher_in_training_mode", "modes", "yxuansu/TaCL#11", generative.distill, 0, r"teacher.*"),
    Bug("statistics_by_checkpoint", "modes", "pytorch/pytorch#96136", vision.finetune, 0, rf"{RUNNING}|backbone.*"),
    Bug("nan_batch_in_statistics", "modes", "pytorch/pytorch#88474", vision.finetune, 6, rf"{RUNNING}|backbone.*|{BATCH}"),
    # ---- precision --------------------------------------------------------------------------------------------------
    Bug("default_dtype_left", "precision", "huggingface/transformers#28461", text.nano_gpt, 20, r"positions.*|.*dtype.*",
        "default dtype"),
    Bug("pure_bfloat16", "precision", "meta-pytorch/torchtune#2254", text.nano_gpt_small_rate, 0, WEIGHTS),
    Bug("loop_under_autocast", "precision", "pytorch/pytorch#120376", text.mixed_precision, 0, r"head.*|body.*|autocast.*",
        "autocast"),
    # ---- state ------------------------------------------------------------------------------------------------------
    Bug("halved_by_saving", "state", "ultralytics/ultralytics#14418", text.nano_gpt, 12, WEIGHTS),
    Bug("seeded_by_sampling", "state", "huggingface/diffusers#175", generative.diffusion, 8, rf"random state|{BATCH}",
        "random"),
    # ---- two ranks --------------------------------------------------------------------------------------------------
    Bug("codebook_of_each_rank", "distributed", "ZhikangNiu/encodec-pytorch#15", ranks.codec, 0,
        r".*quantizer.*", ranks=2),
    Bug("unfrozen_after_wrapping", "distributed", "facebookresearch/detectron2#2486", ranks.unfreezing, 24, r"(module\.)?0\..*",
        ranks=2),
    Bug("gathered_without_gradient", "distributed", "facebookresearch/SLIP#31", ranks.clip, 0,
        rf".*(image|text|logit_scale).*|{LOSS}", ranks=2),
)  # fmt: skip
