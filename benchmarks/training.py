"""Training speed of both stages against the teacher's own passes, in one run.

    python benchmarks/training.py [--teacher smollm2-135m] [--lengths 1024,4096] [--window 0] [--repeats 3]

Stage 1 is one forward with all local losses and their backwards, against the teacher's forward; stage 2 is forward
and backward of the student's cross-entropy, against the teacher's own. The ratio printed is time over the teacher's:
1 / ratio is the share of the teacher's tokens per second.
"""

import argparse

import torch
from timing import compare

from attn2mamba.convert import convert, hand_over
from attn2mamba.data import load_texts
from attn2mamba.recipe import Recipe
from attn2mamba.stages import FinetuneStage, TransferStage, train_only
from attn2mamba.teachers import load_teacher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    loaded = load_teacher(options.teacher)
    ids = loaded.tokenizer("\n".join(load_texts("python-docs")), verbose=False)["input_ids"]
    stages = [
        {"kind": "transfer", "mixer": {"share": "none", "window": options.window}, "tokens": 1, "lr": 1e-2},
        {"kind": "finetune", "mixer": {"name": "hedgemamba"}, "tokens": 1, "lr": 3e-4},
    ]
    for length in map(int, options.lengths.split(",")):
        recipe = Recipe.model_validate({"sequence_length": length, "batch_size": 1, "stages": stages})
        batch = {"input_ids": torch.tensor([ids[:length]]), "document_ids": torch.zeros(1, length, dtype=torch.long)}
        print(f"{length} tokens, window {options.window}")
        measure(loaded.model, recipe, batch, options.repeats)


def measure(teacher, recipe: Recipe, batch, repeats: int) -> None:
    student, _ = convert(teacher, recipe.stages[0].mixer.model_dump())
    teacher.requires_grad_(True)

    def teacher_forward():
        with torch.no_grad():
            teacher(batch["input_ids"], use_cache=False)

    def teacher_both():
        teacher(batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss.backward()
        teacher.zero_grad()

    def step(stage):
        stage.backward(batch, stage.count(batch))
        student.zero_grad()

    stage = TransferStage(student, recipe, recipe.stages[0])
    train_only(student, stage)
    stage.start()
    compare({"teacher forward": teacher_forward, "stage 1": lambda: step(stage)}, repeats)
    stage.stop()
    hand_over(student, recipe.stages[1].mixer.model_dump())
    stage = FinetuneStage(student, recipe, recipe.stages[1], None)
    train_only(student, stage)
    stage.start()
    compare({"teacher forward and backward": teacher_both, "stage 2": lambda: step(stage)}, repeats)


if __name__ == "__main__":
    main()
