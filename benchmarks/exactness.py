"""Is every answer of the engine the one of plain decoding? One report over tiny models, the real one in fp32 and bf16.

    python -m benchmarks.exactness                          everything: about 20 minutes on 2 cores
    python -m benchmarks.exactness --part tiny --cells 600
"""

from __future__ import annotations

import sys

from benchmarks.exact.tiny import run_tiny

if __name__ == "__main__":
    part = run_tiny(int(sys.argv[1]), lambda line: print(line, file=sys.stderr, flush=True))
    print({k: v for k, v in part.as_json().items() if k != "mismatch_list"})
    for m in part.mismatches[:10]:
        print(m)
