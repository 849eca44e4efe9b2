"""Compilation ahead of time, for TPUs that are not attached."""
