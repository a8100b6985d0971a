"""Score each protocol's gold answers (must be 100%) and corrupted ones (0%), all problems.

    python scripts/eval_gold.py --data DIR [--allow-code-execution] [PROTOCOL ...]

Without --allow-code-execution, protocols whose answers are programs are left out. The exit status
is 1 if a score is not what it must be.
"""

from __future__ import annotations

import argparse
import sys
import time

from dlm_decode.eval.problems import load_problems
from dlm_decode.eval.protocols import load_protocol, names
from dlm_decode.eval.scoring import executes, score_answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("protocols", nargs="*", metavar="PROTOCOL", help="default: all")
    parser.add_argument("--data", help="folder of the data files; default: DLM_DATA")
    parser.add_argument("--allow-code-execution", action="store_true")
    args = parser.parse_args()
    protocols = [load_protocol(name) for name in args.protocols or names()]
    chosen = [p for p in protocols if args.allow_code_execution or not executes(p)]
    failed = 0
    for protocol in chosen:
        asked = load_problems(protocol, args.data)
        for kind, expected in (("gold", True), ("corrupted", False)):
            started = time.perf_counter()
            pairs = [(problem, getattr(problem, kind)) for problem in asked.problems]
            judged = score_answers(protocol, pairs, allow_code_execution=args.allow_code_execution)
            wrong = [
                problem.id
                for problem, (scores, _) in zip(asked.problems, judged, strict=True)
                if set(scores.values()) != {expected}
            ]
            failed += bool(wrong)
            shown = f"not as they must be: {', '.join(wrong[:8])}" if wrong else "as they must be"
            took = time.perf_counter() - started
            print(f"{protocol.id} {kind}: {len(pairs)} answers, {shown} ({took:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
