"""A run's folder, local or on `gs://`: its files, its lock, and `load`."""
