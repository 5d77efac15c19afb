"""What hears of the steps of a run: callbacks of the user's own, and writers for CSV, TensorBoard and W&B."""

from .base import Callback, CallbackList, StepFunction
from .tensorboard import TensorBoardWriter
from .writers import WRITERS, CSVWriter, WandbWriter, make_writers

__all__ = [
    "WRITERS", "CSVWriter", "Callback", "CallbackList", "StepFunction", "TensorBoardWriter", "WandbWriter",
    "make_writers",
]  # fmt: skip
