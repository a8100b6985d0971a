"""Compare finished evaluation runs: paired test, identity rate, accuracy under parallelism, plots.

RUN is a folder that `dlm-decode eval` wrote, or one that holds several. The runs of a task are
compared with the first of them given.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="results folders")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write plots into this folder")
    parser.add_argument(
        "--sample", metavar="ID", help="the request whose commit order is drawn (of --trace runs)"
    )


def run(args: argparse.Namespace) -> int:
    from dlm_decode.eval.comparison import find_runs, report, report_text

    runs = find_runs(args.runs)
    print(json.dumps(report(runs), indent=2) if args.json else report_text(runs), end="")
    if args.plot is not None:
        from dlm_decode.eval.plots import save_plots

        for path in save_plots(runs, args.plot, sample=args.sample):
            print(f"wrote {path}", file=sys.stderr)
    return 0
