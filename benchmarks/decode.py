"""Decode speed of a converted model beside its teacher, one sequence, by context length, in one run.

    python benchmarks/decode.py [--teacher smollm2-135m] [--mixer hedgemamba] [--window 64] [--contexts 64,1024,4096]

The student is untrained: speed does not depend on the weights. Steps of both alternate.
"""

import argparse

import torch
from timing import compare

from attn2mamba.convert import convert
from attn2mamba.evaluate.generation import read_context
from attn2mamba.teachers import load_teacher

STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--mixer", default="hedgemamba")
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--contexts", default="64,1024,4096")
    options = parser.parse_args()
    teacher = load_teacher(options.teacher).model
    student, _ = convert(teacher, {"name": options.mixer, "window": options.window})
    for context in map(int, options.contexts.split(",")):
        print(f"one token after {context} tokens")
        with torch.inference_mode():
            steps = {"teacher": read_context(teacher, context), "student": read_context(student, context)}
            compare(steps, STEPS)


if __name__ == "__main__":
    main()
