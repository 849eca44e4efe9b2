"""Reports of a run: progress, metrics, traces and plots."""
