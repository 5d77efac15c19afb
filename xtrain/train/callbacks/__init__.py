"""Callbacks of a run: the user's, and writers for CSV, TensorBoard and Weights & Biases."""

from .base import Callback, CallbackList, StepFunction
from .profile import ProfileWriter
from .tensorboard import TensorBoardWriter
from .writers import WRITERS, CSVWriter, WandbWriter, make_writers

__all__ = [
    "WRITERS", "CSVWriter", "Callback", "CallbackList", "ProfileWriter", "StepFunction", "TensorBoardWriter",
    "WandbWriter", "make_writers",
]  # fmt: skip
