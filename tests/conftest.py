"""Every test runs on eight CPU devices, from a checkout as from an installation."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
