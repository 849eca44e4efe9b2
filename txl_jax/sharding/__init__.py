"""The mesh of devices, and the shardings of arrays."""
