"""Import of other code bases' checkpoints, and a model as one file."""
