"""Consistency training, the entry for launchers.

    deepspeed train/cllm.py --config math --train.lr 1e-4
    deepspeed --num_accelerators 2 train/cllm.py --config math --deepspeed zero2
    python train/cllm.py --config math

It is ``jacobi-train run`` under a name that a launcher can start. Run as a script, this folder is first on
``sys.path``; hence every import goes through ``jacobi_llm``, and no file here may carry the name of a dependency.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from jacobi_llm.configs import cli
from jacobi_llm.train.cli import RUN

COMMAND = dataclasses.replace(
    RUN, name="cllm", example="deepspeed --num_accelerators 2 train/cllm.py --config math --train.lr 1e-4"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the script; returns its exit code."""
    return cli.main("train/cllm.py", COMMAND.summary, (COMMAND,), argv, single_command=True)


if __name__ == "__main__":
    sys.exit(main())
