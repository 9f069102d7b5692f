"""`python -m kvscaler_sidecar` is `kvscaler-sidecar`."""

import sys

from kvscaler_sidecar.main import main

sys.exit(main())
