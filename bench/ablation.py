#!/usr/bin/env python3
"""Measures one ingredient of kvant's schemes at a time: a table for docs/quality.md.

Each group changes one thing of a reference scheme; everything comes from one `kvant eval`, so that all rows share text,
scored positions and baseline. Exit codes: 0, 2 wrong use, others: kvant's own.
"""

import argparse
import json
import os
import sys

from quality import Bench, put

K, V = "k=6-4-3-3", "v=4"  # kv4 with a calibration
C, H = "k=c4a", "v=4,vx=hadamard"  # kv4 without

# (group, label, scheme)
ROWS = [
    ("window", "0", f"{K},{V},w=0,s=16"),
    ("window", "32", f"{K},{V},w=32,s=16"),
    ("window", "64", f"{K},{V},w=64,s=16"),
    ("window", "128", f"{K},{V},w=128,s=16"),
    ("window", "256", f"{K},{V},w=256,s=16"),
    ("sinks", "0", f"{K},{V},w=128,s=0"),
    ("sinks", "4", f"{K},{V},w=128,s=4"),
    ("sinks", "64", f"{K},{V},w=128,s=64"),
    ("neither window nor sinks", "0, 0", f"{K},{V},w=0,s=0"),
    ("transform of both sides", "none", "k=4,v=4,w=128,s=16,kx=none,vx=none"),
    ("transform of both sides", "Hadamard", "k=4,v=4,w=128,s=16,kx=hadamard,vx=hadamard"),
    ("transform of both sides", "calibrated", "k=4,v=4,w=128,s=16,kx=calibrated,vx=calibrated"),
    ("grid of keys per channel", "symmetric", f"k=c4,{H},w=128,s=16"),
    ("grid of keys per channel", "asymmetric", f"{C},{H},w=128,s=16"),
    ("grid of calibrated tokens", "asymmetric", "k=4a,v=4,w=128,s=16"),
    ("key bands at 4 bits", "1", "k=4,v=4,w=128,s=16"),
    ("key bands at 4 bits", "2", "k=5-3,v=4,w=128,s=16"),
    ("key bands at 4 bits", "4", f"{K},v=4,w=128,s=16"),
    ("key bands at 4 bits", "4, fitted per head", f"{K},v=4,w=128,s=16,fit=1"),
    ("key bands at 3 bits", "4", "k=5-3-3-3,v=3,w=128,s=16"),
    ("key bands at 3 bits", "4, fitted per head", "k=5-3-3-3,v=3,w=128,s=16,fit=1"),
    ("key bands at 2 bits", "4", "k=4-2-2-2,v=2-2,w=128,s=16"),
    ("key bands at 2 bits", "4, fitted per head", "k=4-2-2-2,v=2-2,w=128,s=16,fit=1"),
    ("value bands at 4 bits", "2", f"{K},v=5-3,w=128,s=16"),
    ("value bands at 4 bits", "4", f"{K},v=5-4-4-3,w=128,s=16"),
    ("key bands at 4 bits", "4, flatter", f"k=5-4-4-3,{V},w=128,s=16"),
    ("scales", "8 bits", f"{K}:s8,v=4:s8,w=128,s=16"),
    ("scales", "16 bits", f"{K}:s16,v=4:s16,w=128,s=16"),
    ("mean of uncalibrated keys", "page mean, then tokens", f"k=ct4,{H},w=128,s=16"),
    ("for comparison", "one scale per layer and side", "cmp-static-tensor"),
    ("for comparison", "one scale per head", "cmp-static-head"),
    ("for comparison", "KIVI's layout", "cmp-kivi4"),
    ("for comparison", "KIVI's layout, 2 bits", "cmp-kivi2"),
    ("for comparison", "groups of 32", "cmp-groups8"),
    ("for comparison", "groups of 32, 4 bits", "cmp-groups4"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvant", required=True, help="the kvant binary")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--name", required=True, help="of the model; the ladder's name finds the ladder's calibration")
    parser.add_argument("-f", "--file", required=True, help="text to evaluate on")
    parser.add_argument("--filler", required=True, help="calibration text and filler of the copy test")
    parser.add_argument("--results", required=True, help="folder where calibrations are kept")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--groups", help="only these groups, separated by commas")
    parser.add_argument("--report", help="Markdown file to write, between its marks where it has them (default: standard output)")
    args = parser.parse_args()
    wanted = args.groups.split(",") if args.groups else None
    rows = [row for row in ROWS if wanted is None or row[0] in wanted]
    if not rows:
        parser.error("--groups: none of " + ", ".join(sorted({row[0] for row in ROWS})))
    schemes = list(dict.fromkeys(scheme for _, _, scheme in rows))
    command = [args.kvant, "eval", "-m", args.model, "-f", args.file, "--filler", args.filler, "--no-speed", "--json", "-c",
               str(args.ctx_size), "-t", str(args.threads), "--kv", ";".join(schemes)]
    bench = Bench(args)
    answer = json.loads(bench.run(command, bench.calibration(args.name, args.model)))
    measured = {(row["test"], row["name"]): row for row in answer["rows"]}
    lines = ["| ingredient | | scheme | bits K / V | KL, text | 95 % | p99.9 | KL, copy | p99.9 |\n|---|---|---|---|---|---|---|---|---|"]
    for group, label, scheme in rows:
        row, copy = measured["text", scheme], measured["copy", scheme]
        kl = row["kl"]
        lines.append(f"| {group} | {label} | `{scheme}` | {row['bits_k']:.2f} / {row['bits_v']:.2f} | {kl['mean']:.5f} | "
                     f"{kl['lo']:.5f} .. {kl['hi']:.5f} | {kl['p999']:.3f} | {copy['kl']['mean']:.5f} | {copy['kl']['p999']:.3f} |")
    put(args.report, "ablation", "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
