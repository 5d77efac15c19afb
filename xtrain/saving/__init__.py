"""Checkpoint directories: a Hugging Face model directory plus what a run needs to continue bit for bit.

    config.json generation_config.json      what every Hugging Face reader expects
    model.safetensors tokenizer*.json
    optimizer.safetensors                   moments and float32 masters
    trainer_state.json                      step, positions, random state, configuration
    manifest.json                           size and hashes of every file above, written last

A directory appears under its name only when it is complete: it is written beside as `.NAME.tmp-XXXXXXXXXX`, every file
and the directory are flushed to the disk, and one rename publishes it. Whatever fails on the way (a full disk, a kill),
older checkpoints are untouched. One that is being replaced changes places with the new one in one step; where the
system cannot do that, it is called `.NAME.old-XXXXXXXXXX` for the moment between two renames.
"""

from .checkpoint import (
    first_valid,
    load_checkpoint,
    newest_valid,
    read_trainer_state,
    save_checkpoint,
    verify_checkpoint,
)
from .directory import FORMAT, MANIFEST, DirectoryWriter
from .generation_config import read_generation
from .model import SHARD_BYTES, has_weights, load_model, parse_size, read_config, read_tensors, save_model
from .places import (
    checkpoint_name,
    checkpoint_step,
    clean_temporary,
    displaced_hint,
    find_checkpoints,
    find_displaced,
    is_emergency,
    modified,
    remove_checkpoint,
    set_aside_after,
)
from .reader import DirectoryReader
from .safetensors import SafetensorsFile, chunks

__all__ = [
    "FORMAT", "MANIFEST", "SHARD_BYTES", "DirectoryReader", "DirectoryWriter", "SafetensorsFile", "checkpoint_name",
    "checkpoint_step", "chunks", "clean_temporary", "displaced_hint", "find_checkpoints", "find_displaced",
    "first_valid", "has_weights", "is_emergency", "load_checkpoint", "load_model", "modified", "newest_valid",
    "parse_size", "read_config", "read_generation", "read_tensors", "read_trainer_state", "remove_checkpoint",
    "save_checkpoint", "save_model", "set_aside_after", "verify_checkpoint",
]  # fmt: skip
