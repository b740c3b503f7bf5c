"""The key data of a reinforcement-learning run (prompts, responses, rewards, log-probabilities): saved, and compared.

    from trainprobe import SingleSave
    SingleSave("rollout_data")
    SingleSave.save({"prompt": prompts, "response": responses, "log_prob": log_prob})   # once per micro-batch
    SingleSave.step()                                                                   # once per training step

`trainprobe rollout-compare A B` says where two such runs differ first. The folder layout and the sheets are those of
mindstudio-probe, whose folders are read as well.
"""

from trainprobe.rollout.compare import RolloutComparison as RolloutComparison
from trainprobe.rollout.compare import SingleComparator as SingleComparator
from trainprobe.rollout.save import SingleSave as SingleSave
