"""The command line: flags, help and one function per mode."""
