"""Run several commands in one process, which starts once: each a list of words in a JSON list.

Words of the form NAME=value before the others are put into the environment.
"""

from __future__ import annotations

import json
import os
import sys

from drafthead.train.cli import main

for words in json.loads(sys.argv[1]):
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    sys.argv = ["drafthead", *words]
    try:
        main()
    except SystemExit as end:
        sys.stdout.write(f"[exit {end.code}]\n")
        sys.stdout.flush()
