"""The fused attention kernel for TPUs, in Pallas."""
