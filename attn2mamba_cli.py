"""The command line. A module of its own, so that --help does not wait for torch: importing the package
registers the model classes with transformers, which takes seconds."""

import json
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

app = typer.Typer(
    help="Convert a pretrained Transformer into a Mamba model of the same quality.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

TeacherName = Annotated[
    str, typer.Option("--teacher", help="Hub id, directory, .gguf file, wheel, smollm2-135m or gemma3-270m.")
]
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
DType = Annotated[
    Literal["fp32", "bf16", "fp16", "auto"], typer.Option("--dtype", help="Of the weights; auto is as they are stored.")
]
DeviceMap = Annotated[
    str | None, typer.Option("--device-map", help="auto spreads the layers over all devices; default: the CPU.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read weights kept in pickles (*.bin); do so for files you trust.")
]


@app.command()
def distill(
    teacher: TeacherName,
    data: Data,
    recipe: Annotated[
        str, typer.Option(help="A shipped recipe (see `attn2mamba recipes`) or a YAML file.")
    ] = "default",
    base: Annotated[
        str | None, typer.Option(help="Model to convert, when it is not the teacher: as --teacher, same tokenizer.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the run; needed unless --dry-run.")] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="Held-out text, as --data; drawn from the data when not given.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 typer copies it
    allow_pickle: AllowPickle = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its cost; write nothing.")] = False,
) -> None:
    """Turn TEACHER, or a smaller BASE that learns from it, into a Mamba model: OUTPUT/final, and a scorecard."""
    from attn2mamba.recipe import load_recipe

    resolved = load_recipe(recipe, overrides)
    base = None if base == teacher else base
    if dry_run:
        return _dry_run(resolved, teacher, base, data, validation, allow_pickle)
    if output is None:
        raise typer.BadParameter("give a directory for the run", param_hint="--output")
    from rich.console import Console

    from attn2mamba import distill as run_distillation
    from attn2mamba.scorecard import make_scorecard, print_scorecard

    try:
        run_distillation(
            resolved,
            teacher,
            data,
            output,
            base=base,
            validation=validation,
            resume=resume,
            allow_pickle=allow_pickle,
        )
    except KeyboardInterrupt:
        options = [("recipe", recipe), ("teacher", teacher), *([("base", base)] if base else [])]
        options += [("data", d) for d in data]
        options += [*(("validation", v) for v in validation or ()), *(("set", o) for o in overrides)]
        words = [word for name, value in [*options, ("output", str(output))] for word in (f"--{name}", value)]
        words += ["--allow-pickle"] if allow_pickle else []
        sys.stderr.write(f"\nStopped. Continue with\n  attn2mamba distill {shlex.join(words)} --resume\n")
        raise typer.Exit(130) from None
    print_scorecard(make_scorecard(output, teacher, base_name=base, allow_pickle=allow_pickle), Console())


def _dry_run(
    recipe: Any,
    teacher_name: str,
    base_name: str | None,
    data: list[str],
    validation: list[str] | None,
    allow_pickle: bool,
) -> None:
    import tempfile

    from rich.console import Console
    from rich.table import Table

    from attn2mamba.data import open_data
    from attn2mamba.distill import load_models
    from attn2mamba.plan import plan
    from attn2mamba.sizes import human_bytes
    from attn2mamba.vocabulary import tokenizer_of

    teacher, base = load_models(recipe, teacher_name, base_name, allow_pickle)
    table = Table(title="Plan", title_justify="left")
    with tempfile.TemporaryDirectory() as cache:
        length = recipe.sequence_length
        stream, _ = open_data(
            data, tokenizer_of(base), length, seed=recipe.seed, validation=validation, cache_dir=Path(cache)
        )
        stages = plan(recipe, teacher, base, stream)
    for column in ("stage", *(s.name for s in stages)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    table.add_row("mixer", *(s.mixer for s in stages))
    table.add_row("parameters that train", *(f"{s.trainable:,}" for s in stages))
    if any(s.projectors for s in stages):
        table.add_row("of them in projectors, dropped", *(f"{s.projectors:,}" for s in stages))
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
    model: Annotated[str, typer.Argument(help="A run, or what distill takes as a teacher.")],
    teacher: Annotated[str | None, typer.Option(help="Score this model too, on the same text.")] = None,
    data: Annotated[str, typer.Option(help="Text to score: one source, as for distill.")] = "python-docs",
    context: Annotated[int, typer.Option(min=1, help="Tokens per window.")] = 1024,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens.")] = None,
    dtype: DType = "fp32",
    device_map: DeviceMap = None,
    allow_pickle: AllowPickle = False,
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
    figures: dict[str, Any] = {"data": data, "context": context, "precision": dtype, "models": {}}
    table = Table(title=f"{data}, {context} tokens of context, {dtype}", title_justify="left")
    for column in ("model", "tokens", "perplexity", "by word", "bits per byte", "ratio to teacher"):
        table.add_column(column)
    reference = None
    for name in [teacher, model] if teacher else [model]:
        loaded = _load_model(name, dtype, device_map, allow_pickle)
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
    model: Annotated[str, typer.Argument(help="A run, or what distill takes as a teacher.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    dtype: DType = "fp32",
    device_map: DeviceMap = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Continue PROMPT, printing the text as it comes."""
    import torch

    from attn2mamba.evaluate.generation import continue_text

    loaded = _load_model(model, dtype, device_map, allow_pickle)
    torch.manual_seed(seed)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    write(prompt)
    continue_text(loaded.model, loaded.tokenizer, prompt, max_new_tokens, temperature, write)
    write("\n")


@app.command()
def inspect(
    teacher: Annotated[str, typer.Argument(help="Hub id, directory, .gguf file, wheel, smollm2-135m or gemma3-270m.")],
    recipe: Annotated[
        str, typer.Option(help="Reckon the cost of this recipe: a shipped one or a YAML file.")
    ] = "default",
    overrides: Overrides = [],  # noqa: B006 typer copies it
    hardware: Annotated[
        str, typer.Option(help="An accelerator, such as a100-80gb, h100-sxm or rtx-4090, or a number of FLOP/s.")
    ] = "a100-80gb",
    utilisation: Annotated[float, typer.Option(min=0.001, max=1, help="Share of its peak that is reached.")] = 0.4,
    devices: Annotated[int, typer.Option(min=1, help="How many of them share the work.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What would be converted, what is added, memory by context length, and the cost of training. Reads no weights."""
    import torch
    from rich.console import Console

    from attn2mamba import load
    from attn2mamba.hardware import parse_hardware
    from attn2mamba.inspection import Terms, inspect_model
    from attn2mamba.inspection_text import print_inspection
    from attn2mamba.recipe import load_recipe

    terms = Terms(recipe, load_recipe(recipe, overrides), parse_hardware(hardware), utilisation, devices)
    final = Path(teacher) / "final"  # of a run
    model = load(str(final) if final.is_dir() else teacher, config_only=True, dtype=torch.bfloat16)
    found = inspect_model(model, terms)
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


def _load_model(name: str, dtype: str, device_map: str | None, allow_pickle: bool) -> Any:
    """Any model that load_teacher takes, or a run's directory, which stands for its final model."""
    from attn2mamba.teachers import DTYPES, load_teacher

    final = Path(name) / "final"
    path = str(final) if final.is_dir() else name
    return load_teacher(path, dtype=DTYPES[dtype], device_map=device_map, allow_pickle=allow_pickle)


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
