"""The command line. A module of its own, so that --help does not wait for torch: importing the package
registers the model classes with transformers, which takes seconds."""

import json
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Convert a pretrained Transformer into a Mamba model of the same quality.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

TeacherName = Annotated[str, typer.Option("--teacher", help="Hub id, directory, .gguf file, or smollm2-135m.")]
Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        help="Hub id, file, directory or glob of .txt .jsonl .parquet, or python-docs; repeatable, as DATA=WEIGHT too.",
    ),
]
Overrides = Annotated[
    list[str], typer.Option("--set", help="Override a recipe key, e.g. stages.0.tokens=1e6; repeatable.")
]
OutputFile = Annotated[Path | None, typer.Option("--output", help="Also write the figures to this JSON file.")]


@app.command()
def distill(
    teacher: TeacherName,
    data: Data,
    recipe: Annotated[
        str, typer.Option(help="A shipped recipe (see `attn2mamba recipes`) or a YAML file.")
    ] = "default",
    output: Annotated[Path | None, typer.Option(help="Directory of the run; needed unless --dry-run.")] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="Held-out text, as --data; drawn from the data when not given.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 typer copies it
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its cost; write nothing.")] = False,
) -> None:
    """Turn TEACHER into a Mamba model: OUTPUT/final, and a scorecard."""
    from attn2mamba.recipe import load_recipe

    resolved = load_recipe(recipe, overrides)
    if dry_run:
        return _dry_run(resolved, teacher, data, validation)
    if output is None:
        raise typer.BadParameter("give a directory for the run", param_hint="--output")
    from rich.console import Console

    from attn2mamba import distill as run_distillation
    from attn2mamba.scorecard import make_scorecard, print_scorecard

    try:
        run_distillation(resolved, teacher, data, output, validation=validation, resume=resume)
    except KeyboardInterrupt:
        options = [("recipe", recipe), ("teacher", teacher), *(("data", d) for d in data)]
        options += [*(("validation", v) for v in validation or ()), *(("set", o) for o in overrides)]
        words = [word for name, value in [*options, ("output", str(output))] for word in (f"--{name}", value)]
        sys.stderr.write(f"\nStopped. Continue with\n  attn2mamba distill {shlex.join(words)} --resume\n")
        raise typer.Exit(130) from None
    print_scorecard(make_scorecard(output, teacher), Console())


def _dry_run(recipe: Any, teacher_name: str, data: list[str], validation: list[str] | None) -> None:
    import tempfile

    from rich.console import Console
    from rich.table import Table

    from attn2mamba import load
    from attn2mamba.data import open_data
    from attn2mamba.plan import plan
    from attn2mamba.sizes import human_bytes
    from attn2mamba.teachers import check_length

    teacher = load(teacher_name)
    check_length(teacher.model, recipe.sequence_length)
    table = Table(title="Plan", title_justify="left")
    with tempfile.TemporaryDirectory() as cache:
        length = recipe.sequence_length
        stream, _ = open_data(
            data, teacher.tokenizer, length, seed=recipe.seed, validation=validation, cache_dir=Path(cache)
        )
        stages = plan(recipe, teacher, stream)
    for column in ("stage", *(s.name for s in stages)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    table.add_row("mixer", *(s.mixer for s in stages))
    table.add_row("parameters that train", *(f"{s.trainable:,}" for s in stages))
    table.add_row("frozen parameters", *(f"{s.frozen:,}" for s in stages))
    table.add_row("tokens", *(f"{s.tokens:,}" for s in stages))
    table.add_row("optimiser steps", *(f"{s.steps:,}" for s in stages))
    table.add_row("state per sequence", *(human_bytes(s.state_bytes) for s in stages))
    table.add_row("about, on this machine", *(_duration(s.seconds) for s in stages))
    Console().print(table)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A model directory, a run, a hub id, a .gguf file or a built-in name.")],
    teacher: Annotated[str | None, typer.Option(help="Score this model too, on the same text.")] = None,
    data: Annotated[str, typer.Option(help="Text to score: one source, as for distill.")] = "python-docs",
    context: Annotated[int, typer.Option(min=1, help="Tokens per window.")] = 1024,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens.")] = None,
    output: OutputFile = None,
) -> None:
    """Perplexity of MODEL, and of its teacher, on text."""
    from rich.console import Console
    from rich.table import Table

    from attn2mamba.data import load_texts
    from attn2mamba.evaluate.perplexity import text_perplexity
    from attn2mamba.run import disk_errors, write_text
    from attn2mamba.teachers import check_length

    load_texts(data)  # a wrong name fails before a model is loaded
    figures: dict[str, Any] = {"data": data, "context": context, "precision": "fp32", "models": {}}
    table = Table(title=f"{data}, {context} tokens of context, fp32", title_justify="left")
    for column in ("model", "tokens", "perplexity", "by word", "bits per byte", "ratio to teacher"):
        table.add_column(column)
    reference = None
    for name in [teacher, model] if teacher else [model]:
        loaded = _load_model(name)
        check_length(loaded.model, context)
        result = text_perplexity(loaded.model, loaded.tokenizer, load_texts(data), context, max_tokens)
        figures["models"][name] = result.to_dict()
        reference = reference or result.per_token
        ratio = f"{result.per_token / reference:.3f}" if name != teacher and teacher else ""
        table.add_row(
            name,
            f"{result.tokens:,}",
            f"{result.per_token:.2f}",
            "" if result.per_word is None else f"{result.per_word:.2f}",
            "" if result.bits_per_byte is None else f"{result.bits_per_byte:.3f}",
            ratio,
        )
    Console().print(table)
    if output:
        with disk_errors(output):
            output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, json.dumps(figures, indent=1))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A model directory, a run, a hub id, a .gguf file or a built-in name.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
) -> None:
    """Continue PROMPT, printing the text as it comes."""
    import torch

    from attn2mamba.evaluate.generation import continue_text

    loaded = _load_model(model)
    torch.manual_seed(seed)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write(prompt)
    continue_text(loaded.model, loaded.tokenizer, prompt, max_new_tokens, temperature, write)
    write("\n")


@app.command()
def inspect(
    teacher: Annotated[str, typer.Argument(help="Hub id, directory, .gguf file, or smollm2-135m.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What would be converted, and state bytes against KV-cache bytes by context length. Reads no weights."""
    import torch
    from rich.console import Console

    from attn2mamba import load
    from attn2mamba.inspection import inspect_teacher, print_inspection

    found = inspect_teacher(load(teacher, config_only=True, dtype=torch.bfloat16))
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print_inspection(found, Console())


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None) -> None:
    """List the shipped recipes, or print one."""
    from attn2mamba.recipe import recipe_names, recipe_text

    if name:
        print(recipe_text(name), end="")
    else:
        for known in recipe_names():
            comment = " ".join(line.removeprefix("# ") for line in recipe_text(known).splitlines()[2:5])
            print(f"{known:14} {comment.split('. ')[0].split(': ')[0]}")


def _load_model(name: str) -> Any:
    """Any model that load_teacher takes, or a run's directory, which stands for its final model."""
    from attn2mamba import load

    final = Path(name) / "final"
    return load(str(final) if final.is_dir() else name)


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2. SIGTERM does what Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # of the command line itself; typer brings its own copy of click
            context = getattr(error, "ctx", None)
            message = f"{error.format_message()} (see {context.command_path if context else 'attn2mamba'} --help)"
        elif type(error).__name__ in ("UserError", "NonFiniteError"):
            message = str(error)
        else:
            raise
        sys.stderr.write(f"attn2mamba: {' '.join(message.split())}\n")
        raise SystemExit(2) from None
    raise SystemExit(status or 0)


if __name__ == "__main__":
    main()
