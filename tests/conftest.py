"""Every test runs on eight CPU devices, from a checkout as from an installation."""

import jax

from txl_jax.report import wait

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# What is said depends on no machine's speed.
wait.QUIET_SECONDS = 3600.0
