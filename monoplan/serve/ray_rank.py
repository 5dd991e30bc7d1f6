"""What Ray starts in place of Python where a replica has several ranks: `mpirun … python -m monoplan.serve.ray_rank`.

Rank 0 becomes the process that Ray wanted, with its command line. The others have no part in Ray: they follow the
engine of rank 0.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    variables = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    if next(os.environ[name] for name in variables if name in os.environ) == "0":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    from monoplan.serve.ray_app import follow

    follow()
