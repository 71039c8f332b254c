"""`python -m drafthead.train --config FILE a.b=c …`: what a launcher starts in each process.

Several processes: `accelerate launch` with a DeepSpeed config, or `torchrun --nproc_per_node N`
(on CPUs `accelerate launch` without DeepSpeed starts one process, whatever it was told).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

import drafthead.heads  # noqa: F401  registers the built-in heads
from drafthead.train.config import load_config
from drafthead.train.loop import run

logger = logging.getLogger("drafthead.train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: 0 done, 2 a user's error in one line, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m drafthead.train",
        description="Train a draft head.",
        epilog="example: python -m drafthead.train --config smollm2-eagle3 training.max_minutes=10",
    )
    parser.add_argument("--config", required=True, help="YAML file, or the name of a preset")
    parser.add_argument("--resume", action="store_true", help="continue the run in `out`")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings over the file's")
    options = parser.parse_args(arguments)
    main_process = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if main_process else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    try:
        result = run(load_config(options.config, options.overrides), resume=options.resume)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        logger.error("error: %s", " ".join(str(error).split()))
        return 2
    if main_process:
        sys.stdout.write(json.dumps(asdict(result), default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
