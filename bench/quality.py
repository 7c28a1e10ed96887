#!/usr/bin/env python3
"""Measures the quality ladder of docs/quality.md: caches of kvant and of llama.cpp on models x texts.

Every figure comes from `kvant eval --json`; this script only runs it, keeps its answers (a later run measures just
what is missing or was measured by another build), lays the rows out as Markdown and holds them to bars.

Exit codes: 0 all bars hold, 1 one falls short, 2 wrong use, others: kvant's own.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

# Each list is one run, so that an interrupted ladder goes on where it was.
PEERS = [["llama:q8_0", "llama:q5_0", "llama:q4_0"], ["llama:q5_1"], ["llama:q4_1", "llama:iq4_nl"],
         ["llama:q8_0/q4_0", "llama:q5_0/q4_0"]]
NAMED = ["exact", "kv8", "kv6", "kv5", "kv4", "kv3", "kv2"]
PLAIN = ["kv8", "kv4", "kv3"]
NO_WINDOW = "kv4,w=0,s=0"

# (kvant's cache, most bits, peer, KL against the peer's on running text, on the copy test, the peer of about the same
# bytes, whose p99.9 and maximum must be worse: llama.cpp has none below q4_0, which kv3 is held to all the same)
BARS = [
    ("kv8", 8.25, "llama:q8_0", 0.5, 1.0, "llama:q8_0"),
    ("kv6", 6.25, "llama:q8_0", 1.0, 2.0, "llama:q5_1"),
    ("kv5", 5.25, "llama:q5_0", 0.08, 0.15, "llama:q5_0"),
    ("kv4", 4.25, "llama:q4_0", 0.05, 0.10, "llama:q4_0"),
    ("kv3", 3.5, "llama:q4_0", 0.25, 0.5, "llama:q4_0"),
    ("kv2", 2.6, "llama:q4_0", 1.0, 1.5, None),
    (NO_WINDOW, 4.5, "llama:q4_0", 0.4, None, "llama:q4_0"),
    ("kv4 (plain)", 4.5, "llama:q4_0", 0.25, 0.5, "llama:q4_0"),
]


@functools.cache
def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()[:16]


class Bench:
    def __init__(self, args):
        self.args = args
        self.results = pathlib.Path(args.results)
        self.results.mkdir(parents=True, exist_ok=True)
        self.build = sha256(args.kvant)

    def run(self, command, recipe=None):
        environment = dict(os.environ, KVANT_RECIPE=str(recipe or "none"))
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
        if done.returncode != 0:
            sys.exit(done.returncode)
        return done.stdout

    def calibration(self, model, path):
        target = self.results / f"{model}-calibration-{self.build}.gguf"
        if not target.exists():
            print(f"calibrate {model}", file=sys.stderr)
            self.run([self.args.kvant, "calibrate", "-m", path, "-f", self.args.filler, "-o", str(target)])
        return target

    def evaluate(self, label, model, text, caches, recipe=None, of_build=True):
        """Rows of `kvant eval` for the caches, measured once per settings."""
        args = self.args
        settings = {"caches": caches, "model": sha256(args.model[model]), "text": sha256(args.text[text]),
                    "ctx": args.ctx_size, "windows": args.windows, "build": self.build if of_build else None}
        file = self.results / f"{model}-{text}-{label}.json"
        if file.exists():
            kept = json.loads(file.read_text())
            if kept["settings"] == settings:
                return kept["eval"]
        print(f"{model}, {text}: {', '.join(caches)}", file=sys.stderr)
        start = time.time()
        command = [args.kvant, "eval", "-m", args.model[model], "-f", args.text[text], "--filler", args.filler,
                   "--no-speed", "--json", "-t", str(args.threads), "-c", str(args.ctx_size), "--windows", str(args.windows),
                   "--kv", ";".join(caches)]
        answer = json.loads(self.run(command, recipe))
        print(f"  {time.time() - start:.0f} s", file=sys.stderr)
        file.write_text(json.dumps({"settings": settings, "command": command, "eval": answer}))
        return answer


def rows_by_test(answer, suffix=""):
    rows = {"text": {}, "copy": {}}
    for row in answer["rows"]:
        rows[row["test"]][row["name"] + suffix] = row
    return rows


def number(value):
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-4 else f"{value:.5f}" if value < 0.1 else f"{value:.3f}"


def table(rows):
    base = rows["llama:q4_0"]["kl"]["mean"]
    lines = ["| cache | bits K / V | bytes/token here | without end | mean KL | 95 % | of q4_0 | p99 | p99.9 | max | top-1 | ppl ratio |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for name, row in rows.items():
        kl = row["kl"]
        lines.append(
            f"| `{name}` | {row['bits_k']:.2f} / {row['bits_v']:.2f} | {row['bytes_per_token']:.0f} | "
            f"{row['bytes_per_token_asymptotic']:.0f} | {number(kl['mean'])} | {number(kl['lo'])} .. {number(kl['hi'])} | "
            f"{kl['mean'] / base:.3f} | {number(kl['p99'])} | {number(kl['p999'])} | {number(kl['max'])} | "
            f"{100 * row['top1']:.2f} % | {row['ppl_ratio']:.4f} |")
    return "\n".join(lines)


def bars(tests):
    """Lines of the table of bars and whether all hold. tests: {(model, text, test): rows}"""
    lines = ["| cache | bits | at most | against | model, text, test | KL ratio | at most | tail against | p99.9 ratio | "
             "max ratio | holds |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    all_hold = True
    for name, most_bits, peer, text_bar, copy_bar, tail_peer in BARS:
        for (model, text, test), rows in tests.items():
            bar = text_bar if test == "text" else copy_bar
            if bar is None or name not in rows:
                continue
            row = rows[name]
            ratio = row["kl"]["mean"] / rows[peer]["kl"]["mean"]
            held_to = tail_peer if tail_peer in rows else None
            other = rows[held_to or peer]["kl"]
            p999, worst = (row["kl"][k] / other[k] for k in ("p999", "max"))
            misses = [what for what, missed in (("bits", row["bits_per_value"] > most_bits + 0.005), ("KL", ratio > bar),
                                                ("p99.9", held_to and p999 > 1), ("max", held_to and worst > 1)) if missed]
            all_hold = all_hold and not misses
            lines.append(f"| `{name}` | {row['bits_per_value']:.2f} | {most_bits} | {peer[6:]} | {model}, {text}, {test} | "
                         f"{ratio:.3f} | {bar} | {(held_to or peer)[6:]} | {p999:.2f} | {worst:.2f} | "
                         f"{'yes' if not misses else '**no**: ' + ', '.join(misses)} |")
    return "\n".join(lines), all_hold


def put(report, mark, text):
    """Prints the text, or replaces with it what stands between the file's two marks, or the file where it has none."""
    if not report:
        print(text, end="")
        return
    path = pathlib.Path(report)
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    old = path.read_text() if path.exists() else ""
    if begin in old and end in old:
        text = old.split(begin)[0] + begin + "\n" + text + end + old.split(end)[1]
    path.write_text(text)


def pairs(values, what):
    out = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or not os.path.isfile(path):
            sys.exit(f"quality: --{what} {value}: give NAME=FILE, and the file must exist")
        out[name] = path
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvant", required=True, help="the kvant binary")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--filler", required=True, help="calibration text and filler of the copy test")
    parser.add_argument("--results", required=True, help="folder where answers are kept")
    parser.add_argument("-c", "--ctx-size", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-lists", type=int, default=len(PEERS), choices=range(1, len(PEERS) + 1),
                        help="of the lists of llama.cpp's caches, measure only the first so many")
    parser.add_argument("--only", metavar="NAME", help="of the models, only this one")
    parser.add_argument("--report", help="Markdown file to write, between its marks where it has them (default: standard output)")
    args = parser.parse_args()
    args.model, args.text = pairs(args.model, "model"), pairs(args.text, "text")
    if args.only and args.only not in args.model:
        parser.error(f"--only {args.only}: not a model; take one of {', '.join(args.model)}")

    bench, all_hold = Bench(args), True
    for model in [args.only] if args.only else args.model:
        tests, parts = {}, []
        recipe = bench.calibration(model, args.model[model])
        for text in args.text:
            plain = rows_by_test(bench.evaluate("plain", model, text, PLAIN), " (plain)")
            named = rows_by_test(bench.evaluate("named", model, text, NAMED + [NO_WINDOW], recipe))
            peers = {"text": {}, "copy": {}}
            for part, caches in enumerate(PEERS[:args.peer_lists]):
                # kv4 among them: positions are scored from the largest exact window on, the same for all.
                answer = rows_by_test(bench.evaluate(f"peers-{part}", model, text, caches + ["kv4"], of_build=False))
                for test, rows in answer.items():
                    peers[test].update((name, row) for name, row in rows.items() if name != "kv4")
            for test in ("text", "copy"):
                rows = {**peers[test], **named[test], **plain[test]}
                tests[(model, text, test)] = rows
                parts.append(f"### {model}, {text}, {'running text' if test == 'text' else 'copy test'}\n\n{table(rows)}\n")
        bar_lines, hold = bars(tests)
        all_hold = all_hold and hold
        put(args.report, f"ladder {model}", "\n".join(parts) + f"\n### {model}, bars\n\n{bar_lines}\n")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
