"""Functions and methods of tensors, composed of the core's, in a file for each topic. Part of the ground floor."""
