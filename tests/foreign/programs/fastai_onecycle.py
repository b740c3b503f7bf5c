"""One cycle of rates with fastai's own optimizer class, then accumulation."""

from fastai.callback.all import GradientAccumulation, ProgressCallback  # noqa: F401
from fastai.test_utils import synth_learner
from fastai.torch_core import set_seed

set_seed(0)
learner = synth_learner(n_trn=10, n_val=2, cuda=False)
learner.fit_one_cycle(4)
learner.fit(1, cbs=[GradientAccumulation(32)])
