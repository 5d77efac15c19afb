"""Optimizers, gradient clipping and learning-rate schedules, with PyTorch's semantics."""

from .adamw import AdamW
from .clip import clip_grad_norm_
from .optimizer import Optimizer
from .schedule import LRScheduler, lr_schedule
from .sgd import SGD

__all__ = ["AdamW", "LRScheduler", "Optimizer", "SGD", "clip_grad_norm_", "lr_schedule"]
