"""Checkpoints through orbax: saving, retention and verification."""
