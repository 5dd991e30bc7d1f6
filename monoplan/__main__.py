"""`python -m monoplan` is the command line."""

import sys

from monoplan.cli import main

sys.exit(main())
