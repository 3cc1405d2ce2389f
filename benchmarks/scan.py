"""The chunked scan against the token loop and against the L x L form, forward and with backward, in one run.

    python benchmarks/scan.py [--length 2048] [--repeats 5]

Prints the median milliseconds of each, and the ratio to the chunked scan pair by pair (min, median, max).
"""

import argparse
from functools import partial

import torch
from timing import compare

from attn2mamba.student.scan import chunked_scan, recurrent_scan

HEADS, KV_HEADS, FEATURES, VALUES = 32, 8, 128, 65


def quadratic(query, key, value, log_decay):
    """All L x L weights at once, keys repeated per query head: what softmax-style code does."""
    repeats = query.shape[1] // key.shape[1]
    key, value, log_decay = (x.repeat_interleave(repeats, 1) for x in (key, value, log_decay))
    total = log_decay.cumsum(-1)
    length = query.shape[2]
    behind = torch.ones(length, length, dtype=torch.bool).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~behind, -torch.inf).exp()
    return (query @ key.mT * decay) @ value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, options.length, FEATURES).softmax(-1)
    key = torch.randn(1, KV_HEADS, options.length, FEATURES).softmax(-1)
    value = torch.randn(1, KV_HEADS, options.length, VALUES)
    log_decay = -torch.rand(1, KV_HEADS, options.length) * 0.01
    inputs = (query, key, value, log_decay)
    scans = {"chunked scan": chunked_scan, "token loop": recurrent_scan, "L x L": lambda *x: (quadratic(*x), None)}
    with torch.no_grad():
        torch.testing.assert_close(chunked_scan(*inputs)[0], quadratic(*inputs), rtol=1e-3, atol=1e-4)
        print("forward")
        compare({name: partial(scan, *inputs) for name, scan in scans.items()}, options.repeats)
    print("forward and backward")
    leaves = [x.requires_grad_() for x in inputs]
    compare({name: partial(both, scan, leaves) for name, scan in scans.items()}, options.repeats)


def both(scan, leaves) -> None:
    torch.autograd.grad(scan(*leaves)[0].sum(), leaves)


if __name__ == "__main__":
    main()
