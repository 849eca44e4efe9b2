"""What a run says: progress, metrics and pictures."""
