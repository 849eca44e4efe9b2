"""Processes and signals: connection, synchronization and termination."""
