"""An engine under peer_host.py that behaves as its options say: `python fake_engine.py OPTIONS_JSON`."""

import json
import sys
import time

from octavo.bench import peer_host


class Engine:
    def __init__(self, options):
        print("noise of an engine on its stdout")
        if options.get("fails") == "opening":
            raise ValueError("no weights")
        self.options = options
        self.facts = {"engine": "fake", "dtype": "bf16"}

    def run(self, requests, at_once):
        print("more noise")
        fails = self.options.get("fails")
        if fails == "running":
            raise RuntimeError("out of luck")
        if fails == "dying":
            raise SystemExit(3)
        if fails == "hanging":
            time.sleep(60)
        counts = [request["max_tokens"] - (fails == "short") for request in requests]
        return [[0.1, 0.1 + 0.01 * (count - 1), count] for count in counts[fails == "fewer" :]]


if __name__ == "__main__":
    peer_host.serve(Engine, json.loads(sys.argv[1]))
