"""Optimizers, gradient clipping and learning-rate schedules, with PyTorch's semantics."""

from ..nn.utils import clip_grad_norm_
from . import lr_scheduler
from .adam import Adam
from .adamw import AdamW
from .chained import ChainedOptimizer
from .ema import EMA
from .muon import Muon
from .optimizer import Optimizer
from .qk_clip import AttentionHeads, QKClip
from .schedule import LRScheduler, lr_schedule
from .sgd import SGD

__all__ = [
    "Adam", "AdamW", "AttentionHeads", "ChainedOptimizer", "EMA", "LRScheduler", "Muon", "Optimizer", "QKClip", "SGD",
    "clip_grad_norm_", "lr_schedule", "lr_scheduler",
]  # fmt: skip
