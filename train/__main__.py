"""`python -m drafthead.train …` is `drafthead train …`, in the form that launchers start.

Several processes: `accelerate launch` with a DeepSpeed config, or `torchrun --nproc_per_node N`
(on CPUs `accelerate launch` without DeepSpeed starts one process, whatever it was told).
"""

from __future__ import annotations

import sys

from drafthead.train.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
