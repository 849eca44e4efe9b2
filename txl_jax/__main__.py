"""`python -m txl_jax` is the command `txl`."""

import sys

from txl_jax.main import main

sys.exit(main())
