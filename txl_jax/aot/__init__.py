"""Programs for devices that are not attached: compiled for TPUs, or as StableHLO."""
