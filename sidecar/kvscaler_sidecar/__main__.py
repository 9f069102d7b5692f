"""`python -m kvscaler_sidecar` is `kvscaler-sidecar`."""

import sys

from kvscaler_sidecar.entry import main

sys.exit(main())
