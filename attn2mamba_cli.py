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
    help="Convert a pretrained Transformer into a Mamba model, and measure what it kept.",
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
        from attn2mamba.plan import print_plan

        return print_plan(resolved, teacher, base, data, validation, allow_pickle)
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
    sys.stderr.write("measuring the scorecard: a continuation and decoding speed\n")
    print_scorecard(make_scorecard(output, teacher, base_name=base, allow_pickle=allow_pickle), Console())


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run, or what distill takes as a teacher.")],
    teacher: Annotated[
        str | None, typer.Option(help="Measure this model too; of a run, its own teacher if not given.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text to score, as for distill; python-docs if none.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Measures, suites (quick, paper, quality, recall, generation, full) or tasks of lm-eval: a,b."
        ),
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with local copies of hub data sets; the hub if not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task, such as documents.")] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Tokens: of perplexity's windows (1024), the first; of tasks by length, all: 1k,4k."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Without --tasks: stop after so many tokens.")] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="Measure this model or run too, as NAME=DIR; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated items and of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences generated at a time: for speed.")] = 8,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int8", "int4"], typer.Option(help="Of the weights of every model.")
    ] = "fp32",
    device_map: DeviceMap = None,
    allow_pickle: AllowPickle = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what an earlier call has measured.")] = False,
    output: OutputFile = None,
) -> None:
    """Quality of MODEL beside its teacher: perplexity on DATA, or --tasks, which a run keeps as evaluation.json.

    With --tasks, what is measured once is kept: the same command goes on where it was stopped."""
    from rich.console import Console

    from attn2mamba.counts import parse_list
    from attn2mamba.evaluate.command import Loading, check_writable, read_header, run_evaluation, score_text
    from attn2mamba.evaluate.options import SuiteOptions
    from attn2mamba.evaluate.text import print_evaluation, print_perplexities
    from attn2mamba.run import write_text

    lengths = parse_list(context, "'--context'", k=1024) if context else None
    loading = Loading(dtype, device_map, allow_pickle)
    if tasks is None:
        for option, value in (("--data-root", data_root), ("--limit", limit), ("--also", also), ("--fresh", fresh)):
            if value:
                raise typer.BadParameter("goes with --tasks", param_hint=option)
        if output:
            check_writable(output)
        if (Path(model) / "final").is_dir():
            teacher = teacher or read_header(Path(model)).get("--teacher")
        names = [teacher, model] if teacher else [model]
        sources = data or ["python-docs"]
        figures = score_text(names, sources, lengths[0] if lengths else 1024, max_tokens, loading)
        print_perplexities(figures, teacher, Console())
        if output:
            write_text(output, json.dumps(figures, indent=1))
        return
    if max_tokens is not None:
        raise typer.BadParameter("goes without --tasks; use --limit", param_hint="--max-tokens")
    options = SuiteOptions(data_root, limit, lengths or SuiteOptions.context, tuple(data or ()), seed, batch_size)
    given = [name for name, value in (("limit", limit), ("context", lengths)) if value is not None]
    command = shlex.join(["attn2mamba", *sys.argv[1:]])
    try:
        report = run_evaluation(
            model,
            [task.strip() for task in tasks.split(",") if task.strip()],
            options,
            given,
            teacher=teacher,
            also=also or (),
            loading=loading,
            output=output,
            fresh=fresh,
            command=command,
        )
    except KeyboardInterrupt:
        sys.stderr.write(f"\nStopped. What was measured is kept; continue with\n  {_without_fresh(command)}\n")
        raise typer.Exit(130) from None
    print_evaluation(report, Console())
    if (Path(model) / "final").is_dir():
        sys.stderr.write(f"kept as {model}/evaluation.json; `attn2mamba report {model}` shows it\n")


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="A run, or what distill takes as a teacher.")],
    teacher: Annotated[
        str | None, typer.Option(help="Measure this model beside it; of a run, its own teacher if not given.")
    ] = None,
    context: Annotated[
        str, typer.Option(help="Tokens read before the new ones, such as 1k,4k,16k; 1k is 1024.")
    ] = "1k,4k",
    batch: Annotated[str, typer.Option(help="Sequences at a time, such as 1,8.")] = "1",
    dtype: Annotated[str, typer.Option(help="Of the weights: some of fp32,bf16,fp16,int8,int4.")] = "fp32",
    state: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="Of a student's states; lower only to see what it costs.")
    ] = "fp32",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded in each repeat.")] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    max_seconds: Annotated[float, typer.Option(min=1, help="For each model at a context and batch.")] = 600,
    data: Annotated[str, typer.Option(help="Text for the perplexity in each precision: one source.")] = "python-docs",
    quality_tokens: Annotated[int, typer.Option(min=0, help="Tokens of it; 0 leaves perplexity out.")] = 2048,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option()] = "auto",
    allow_pickle: AllowPickle = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what an earlier call has measured.")] = False,
    output: OutputFile = None,
) -> None:
    """Speed and memory of MODEL beside its teacher, and where the two meet; of a run also written to RUN/bench.json."""
    from rich.console import Console

    from attn2mamba.bench import bench as measure
    from attn2mamba.benchmarking.cells import Options
    from attn2mamba.benchmarking.text import print_bench
    from attn2mamba.counts import parse_list
    from attn2mamba.evaluate.command import check_writable, read_header
    from attn2mamba.evaluate.results import Results, default_results_dir
    from attn2mamba.progress import Steps
    from attn2mamba.run import write_text

    run = Path(model) if (Path(model) / "final").is_dir() else None
    options = Options(
        contexts=parse_list(context, "--context", k=1024),
        batches=parse_list(batch, "--batch"),
        precisions=tuple(dict.fromkeys(dtype.split(","))),
        new_tokens=new_tokens,
        repeats=repeats,
        device=device,
        max_seconds=max_seconds,
        state=state,
        data=data,
        quality_tokens=quality_tokens,
        allow_pickle=allow_pickle,
    )
    outputs = [path for path in (output, run / "bench.json" if run else None) if path]
    for path in outputs:
        check_writable(path)
    command = shlex.join(["attn2mamba", *sys.argv[1:]])
    subject, other = (str(run / "final"), teacher or read_header(run).get("--teacher")) if run else (model, teacher)
    try:
        report = measure(subject, other, options, Results(default_results_dir(), fresh), Steps(), command)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nStopped. What was measured is kept; continue with\n  {_without_fresh(command)}\n")
        raise typer.Exit(130) from None
    print_bench(report, Console())
    for path in outputs:
        write_text(path, json.dumps(report, indent=1))


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
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories that distill wrote; several stand side by side.")],
    output: Annotated[
        Path | None, typer.Option(help="Directory for the report; the first run's when not given.")
    ] = None,
) -> None:
    """Write report.html and report.json: what RUNS are worth, from what lies in them."""
    from attn2mamba.report import write_report

    print(write_report(runs, output))


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


def _without_fresh(command: str) -> str:
    """`--fresh` would measure again what was measured before the stop."""
    return shlex.join(word for word in shlex.split(command) if word != "--fresh")


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
