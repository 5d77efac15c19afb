"""Functions and methods of tensors that are compositions of the core's: parts of the ground floor, by topic."""
