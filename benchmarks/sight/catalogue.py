"""The cases: class, program, what the first finding must name, and the public thread that each is after."""

from __future__ import annotations

from benchmarks.sight import generative, language, ranks, reinforcement, supervised, vision
from benchmarks.sight.case import Case

WEIGHTS = r".*(weight|bias)"
LOSS = r".*loss.*"
FOLLOWS = r"average|follow|copy|target net|teacher|decay|\bema\b"
LEAK = r"future|later|causal|leak|depend|looks? ahead|next position"
PLACES = r"position|mask|padd|ignored|prompt|token"
TRIVIAL = r"entropy|variance|trivial|constant|no better|broadcast|mean of"
STILL = r"constant|always|never (varies|changes)|\bsame\b|variation|\bvary|stays"
AGAIN = r"again|same (batch|order|data|rows|sample)|repeat|duplicat|equal (batch|input|on all ranks)|alike"

CASES: tuple[Case, ...] = (
    # ---- 1 -----------------------------------------------------------------------------------------------------------------
    Case("moments_on_first_rank_only", 1, ranks.replicas, WEIGHTS, "exp_avg|state|moment|replica", "the optimizer's "
         "state of the first weight differs between ranks", "horovod/horovod#260", 10, 2),
    Case("counters_apart", 1, ranks.replicas, WEIGHTS + "|.*step.*", "step|counter|state|replica", "the optimizer's "
         "counters differ between ranks", "NVIDIA/TransformerEngine#1986", 10, 2),
    Case("divided_by_own_count", 1, ranks.replicas, WEIGHTS, "replica|rank", "the used gradient differs between ranks",
         by=10, ranks=2),
    Case("weights_never_equal", 1, ranks.replicas, WEIGHTS, "replica|rank", "the weights differ between ranks, from the "
         "start", by=10, ranks=2),
    # ---- 2 -----------------------------------------------------------------------------------------------------------------
    Case("average_pushed_away", 2, generative.diffusion, WEIGHTS, FOLLOWS, "a copy of the model moves away from it",
         "ostris/ai-toolkit#1034"),
    Case("average_in_bfloat16", 2, generative.diffusion, WEIGHTS, FOLLOWS, "a copy of the model rounds its updates away",
         "d8ahazard/sd_dreambooth_extension#1415"),
    Case("target_copies_itself", 2, reinforcement.dqn, WEIGHTS, FOLLOWS + "|never (moves|changes)", "a copy of the model "
         "never follows it", "thesouther/MARL#8"),
    Case("rate_inverted", 2, reinforcement.dqn, WEIGHTS, FOLLOWS, "a copy of the model remembers nothing: its decay is 0.01"),
    Case("vectors_left_behind", 2, vision.mean_teacher, r"0\.1\.weight|.*bias", FOLLOWS,
         "some tensors of the teacher do not follow the "
         "student"),
    # ---- 3 -----------------------------------------------------------------------------------------------------------------
    Case("ratio_always_one", 3, reinforcement.ppo, "ratio|clip_fraction", STILL, "the ratio is one at every step",
         "jingyaogong/minimind#775"),
    Case("step_drawn_once", 3, generative.diffusion, "t", STILL, "the steps of the noise are the same at every step "
         "while the batch changes"),
    Case("balance_sums_to_one", 3, supervised.experts, "balance|router.*", STILL, "the balance loss is constant",
         "mindspore-ai/hyper-parallel#752"),
    Case("router_softmax_twice", 3, supervised.experts, "balance|router.*", STILL + "|softmax", "the balance loss hardly "
         "varies, or the router is normalised twice", "huggingface/transformers#45111"),
    Case("reference_drops_out", 3, reinforcement.dpo, WEIGHTS, "dropout|training mode|varies|frozen|reference", "the frozen "
         "reference drops out, or its outputs vary for equal inputs", "huggingface/trl#2042"),
    # ---- 4 -----------------------------------------------------------------------------------------------------------------
    Case("mean_of_micro_means", 4, language.finetune, LOSS + "|" + WEIGHTS + "|grad_norm|", "micro|accumulat|token|mean of",
         "the micro-batches are averaged alone although they have unequal numbers of trained tokens",
         "huggingface/blog#2414"),
    Case("groups_across_prompts", 4, reinforcement.grpo, "reward|.*advantage.*|loss", "group|normali|centred|standardi",
         "advantages are centred "
         "over other groups than those of a prompt", experiment="the program alone knows which rows share a prompt; "
         "equal prompts in the input show it"),
    Case("advantages_by_rank", 4, ranks.actor, "reward|.*advantage.*|loss", "normali|standardi|centred|each rank|alone",
         "advantages are "
         "standardised on each rank alone", "Metta-AI/metta#892", ranks=2,
         experiment="advantages come from elsewhere; no record "
         "says over which rows they are to be standardised"),
    Case("mean_of_rank_means", 4, ranks.tokens, LOSS, "normali|mean|count|token|each rank|alone", "the loss is averaged "
         "over the tokens of each rank alone", ranks=2),
    # ---- 5 -----------------------------------------------------------------------------------------------------------------
    Case("cleared_between_micro_batches", 5, language.finetune, WEIGHTS, "clear|micro|backward|sum|lost", "the used "
         "gradient is that of the last micro-batch alone"),
    Case("generators_gradient_kept", 5, generative.adversaries, "discriminator.*",
         "clear|sum|earlier|kept|left|accumul|backward", "the discriminator's gradient holds that of the generator's pass",
         "ajbrock/BigGAN-PyTorch#25"),
    Case("second_task_overwritten", 5, supervised.two_tasks, "trunk.*", "overwrit|sum|lost|backward|replaced|clear",
         "the gradient of one task is missing in the trunk"),
    Case("gradients_through_bfloat16", 5, supervised.compressed, WEIGHTS, "round|bfloat16|precision|bits|mantissa", "the "
         "used gradient was rounded to bfloat16 on its way"),
    Case("balance_without_gradient", 5, supervised.experts, "balance|.*loss|router.*", "gradient|detach|graph|part|sum",
         "a part of the loss brings no gradient", "NVIDIA-NeMo/Automodel#1408"),
    # ---- 6 -----------------------------------------------------------------------------------------------------------------
    Case("first_answer_token_untrained", 6, language.finetune, "labels|ids", "position|mask|label|target|first", "the first "
         "position of each answer carries no gradient", "verl-project/verl#3287"),
    Case("padding_is_trained", 6, language.finetune, "labels|ids", PLACES, "padded positions carry a gradient"),
    Case("visible_tokens_trained", 6, language.masked, "labels|ids", PLACES + "|target|label", "positions that were not hidden "
         "carry a gradient", "huggingface/transformers#20797"),
    Case("prompt_is_rewarded", 6, reinforcement.grpo, "ids", PLACES, "positions of the prompt carry a gradient",
         "NVIDIA-NeMo/Megatron-Bridge#5959"),
    Case("reward_at_the_padding", 6, reinforcement.reward_model, "ids", PLACES, "the gradient enters at a padded position",
         "EleutherAI/gpt-neox#1285"),
    Case("boxes_of_empty_cells", 6, vision.detection, "box.*|" + LOSS, PLACES + "|cell|empty", "cells without an object "
         "carry a gradient of the box", experiment="which cells hold an object is known to the loss alone"),
    Case("padded_frames_counted", 6, supervised.speech, "frames|ctc_loss", PLACES + "|length|frame",
         "padded frames carry a gradient",
         "speechbrain/speechbrain#496"),
    # ---- 7 -----------------------------------------------------------------------------------------------------------------
    Case("labels_shifted_twice", 7, language.pretrain, "labels|ids", "shift|target|label",
         "the targets lie two places behind the "
         "inputs", "huggingface/transformers#46901"),
    Case("guessed_tokens_visible", 7, language.masked, "labels|ids", "target|label|input|leak",
         "the targets stand in the input "
         "at their places"),
    Case("decoder_reads_its_target", 7, language.translate, "said|target|labels", "target|label|input|leak|shift",
         "the decoder's input "
         "is its target", "lgw863/ACSA-generation#5"),
    Case("noise_is_given", 7, generative.diffusion, "x|mse_loss", "target|label|input|leak", "the target of the loss is the "
         "model's input"),
    Case("price_among_the_columns", 7, supervised.prices, "input|columns", "target|label|column|leak",
         "one column of the input is "
         "the target"),
    # ---- 8 -----------------------------------------------------------------------------------------------------------------
    Case("documents_see_each_other", 8, language.pretrain, "ids|mask|places|labels", "document|mask|end token|pack|position",
         "documents of a "
         "row see each other: end tokens in mid-row, and positions that run through", "huggingface/nanoVLM#204"),
    Case("answers_without_end", 8, language.finetune, "labels|ids", r"\bend\b|eos|stop", "no row has an end token",
         "huggingface/trl#1623", experiment="without knowledge of the tokenizer, a token that never came is not known to "
         "be missing"),
    Case("cut_before_the_answer", 8, language.finetune, "labels|ids", "target|label|ignored", "most rows have no target"),
    Case("inputs_mixed_alone", 8, language.sentiment, "loss|ids", "permut|order|shuffl|entropy|no better|unrelated|random",
         "inputs were permuted and targets not, or the loss stays at the entropy of the targets",
         "datarekha.com: Your model's training loss isn't dropping at all"),
    Case("background_ignored", 8, vision.segmentation, "labels", "ignore|class|label|target", "the ignored class is most of "
         "the targets", "meetps/pytorch-semseg#67"),
    Case("blank_is_a_letter", 8, supervised.speech, "labels|ctc_loss", "blank|class|target|label",
         "the blank is among the targets"),
    # ---- 9 -----------------------------------------------------------------------------------------------------------------
    Case("padding_is_pooled", 9, language.sentiment, "loss|at|ids", TRIVIAL + "|padd", "the loss stays at the entropy of the "
         "targets, or padding is what is read"),
    Case("advantages_over_one_value", 9, reinforcement.ppo, "actor.*|.*loss", "zero|no gradient|trivial|constant|entropy",
         "the actor's gradient is zero", "tensorflow/agents#651"),
    Case("broadcast_over_the_batch", 9, supervised.prices, "loss|mse_loss", TRIVIAL,
         "two shapes are broadcast, or the loss stays at "
         "the variance", "pytorch/pytorch#16045"),
    Case("relu_behind_the_output", 9, supervised.prices, r"loss|2\.(weight|bias)", TRIVIAL + "|dead|zero",
         "the output is zero, or the loss "
         "stays above the variance"),
    # ---- 10 ----------------------------------------------------------------------------------------------------------------
    Case("one_rate_for_all", 10, vision.images, "lr.*|.*group.*|" + WEIGHTS, r"rate|\blr\b|group", "the groups' rates "
         "were 1 to 10 and became equal", "microsoft/hi-ml#611"),
    Case("multiplier_unread", 10, supervised.by_layer, "lr.*|.*group.*|" + WEIGHTS, "lr_mult|unread|unknown|rate|group",
         "a group has a setting that the optimizer does not read", "msight-tech/research-ms-loss#27"),
    Case("optimizer_made_again", 10, vision.images, WEIGHTS, "optimizer|state|counter|made|reset|restart", "the optimizer's "
         "state began anew in mid-run", "alan-turing-institute/deepsensor#47"),
    Case("decay_in_bfloat16", 10, supervised.by_layer, WEIGHTS, "decay|round|bfloat16|precision", "updates or decay "
         "round away in bfloat16", "Nerogar/OneTrainer#996"),
    Case("moments_exchanged", 10, supervised.restarted, WEIGHTS + "|.*exp_avg.*|", "state|moment|order|exp_avg|exchang",
         "two parameters have each other's moments"),
    # ---- 11 ----------------------------------------------------------------------------------------------------------------
    Case("gathered_without_gradient", 11, ranks.contrast, "caption.*", "gather|without (a )?gradient|detach|graph", "what was "
         "gathered enters the loss without a gradient", "HobbitLong/SupContrast#26", ranks=2),
    Case("statistics_without_gradient", 11, ranks.normalised, "1", "reduce|without (a )?gradient|detach|graph", "what "
         "was reduced enters the loss without a gradient", ranks=2),
    Case("input_gradient_not_summed", 11, ranks.halves, "enter.*|columns.*", "replica|rank|reduc|partial|sum", "the "
         "gradient of `enter` differs between ranks", ranks=2),
    # ---- 12 ----------------------------------------------------------------------------------------------------------------
    Case("positions_in_bfloat16", 12, language.rotary, "root", "position|bfloat16|distinct|integer|round|precision",
         "positions above 256 collapse in bfloat16", "EleutherAI/gpt-neox#1003"),
    Case("steps_in_bfloat16", 12, generative.diffusion, "t", "bfloat16|distinct|integer|round|precision|mantissa", "the "
         "steps of the noise were rounded to bfloat16", "nkalyanv99/UNI-D2#6"),
    Case("articles_in_half", 12, supervised.clicks, "bought", "half|float16|distinct|integer|round|mantissa|multiples|even",
         "indices above 2048 were rounded to float16"),
    Case("kinds_in_a_byte", 12, supervised.clicks, "labels", "byte|uint8|255|256|class|target", "no target is above 255 of "
         "300 classes"),
    # ---- 13 ----------------------------------------------------------------------------------------------------------------
    Case("same_order_each_epoch", 13, vision.images, "batch", AGAIN + "|order|epoch", "each epoch has the same batches",
         "lucidrains/DALLE-pytorch#230"),
    Case("first_batch_again", 13, language.sentiment, "batch", AGAIN, "every step has the same batch"),
    Case("workers_read_the_same", 13, vision.streamed, "batch", AGAIN, "each batch comes twice in succession",
         "huggingface/datasets#3423"),
    Case("end_token_vanishes", 13, language.pretrain, "ids|tokens|labels", "no longer|vanish|gone|token|never",
         "token 0 no longer comes"),
    Case("ranks_read_the_same", 13, ranks.readers, "batch", AGAIN + "|same .*ranks|ranks.*same|shard", "both ranks have the "
         "same batches", "Shark-NLP/DiffuSeq#37", ranks=2),
    # ---- 14 ----------------------------------------------------------------------------------------------------------------
    Case("mask_is_added_as_ones", 14, language.pretrain, r"blocks\.[01]", LEAK + "|mask",
         "the mask hides nothing: it is added as "
         "ones and zeros", "huggingface/transformers#48745"),
    Case("time_is_normalised", 14, language.pretrain, "norm", LEAK, "an early output depends on later inputs, through `norm`"),
    Case("convolution_looks_ahead", 14, language.convolved, r"root|layers.*", LEAK, "an early output depends on later inputs",
         "paarthneekhara/byteNet-tensorflow#10"),
    Case("rows_run_together", 14, language.recurrent, "root|rnn", LEAK + "|row|batch|mix", "rows of a batch are mixed",
         "huggingface/transformers#47394"),
)  # fmt: skip
