"""A stand-in for Megatron-LM's trainer, which is in no package: its names, signatures and order of events, on the real core."""

from .training import get_args, pretrain

__all__ = ["get_args", "pretrain"]
