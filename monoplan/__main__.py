"""`python -m monoplan` is the command line."""

import sys

from monoplan.cli.main import main

sys.exit(main())
