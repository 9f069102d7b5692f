"""`python -m kvscaler_operator`."""

import sys

from kvscaler_operator.main import main

sys.exit(main())
