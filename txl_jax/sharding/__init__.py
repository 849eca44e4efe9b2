"""The mesh of devices, and how arrays are split over it."""
