"""Samples that a model draws in training from distributions of torch without letting gradients through.

The methods `sample` and `log_prob` of `torch.distributions` are replaced while a step is audited. Of a sample it is known
whether the numbers that make up its distribution require a gradient, and whether the distribution could have let it through.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributions
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.graph import parameters_behind
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import StepReplacing
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.sampled_without_gradient import SampledWithoutGradient


class Samples(StepReplacing):
    """See the module text.

    drawn: class of a distribution → the first parameter that it depends on, of samples without a gradient. scored: whether the
    log-probability of anything was taken, which is the other way to train a distribution.
    """

    needs = (ModelCalls,)

    def forget(self) -> None:
        """Forget the last step."""
        self.drawn: dict[str, str] = {}
        self.scored = False

    def replaced(self) -> Iterator[Replaced]:
        """Look at the samples of a step."""
        for kind in _kinds():
            for name, watched in (("sample", self._sampled), ("log_prob", self._scored)):
                if name in vars(kind):
                    yield Replaced(kind, name, watched(vars(kind)[name]), traced=True)

    def facts(self, step_data: StepData) -> SampledWithoutGradient:
        """Return the samples without a gradient, where no log-probability was taken in the step."""
        return SampledWithoutGradient({} if self.scored else dict(self.drawn))

    def _sampled(self, original: Any) -> Any:
        def sample(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            if not sample.ended and torch.is_grad_enabled() and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
                self._guard.run(self._look, distribution)
            return original(distribution, *args, **kwargs)

        return sample

    def _scored(self, original: Any) -> Any:
        def log_prob(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            self.scored = True
            return original(distribution, *args, **kwargs)

        return log_prob

    def _look(self, distribution: Any) -> None:
        if not self._audited.of(ModelCalls).runs or not distribution.has_rsample:
            return
        with DisableTorchFunction():
            learned = [t for t in vars(distribution).values() if isinstance(t, Tensor) and t.requires_grad]
            found = next((name for t in learned for name in parameters_behind(t, self._audited.names())), None)
        if found is not None:
            self.drawn.setdefault(type(distribution).__name__, found)


def _kinds() -> Iterator[Any]:
    kinds = (kind for kind in vars(distributions).values() if isinstance(kind, type))
    return (kind for kind in kinds if issubclass(kind, distributions.Distribution))
