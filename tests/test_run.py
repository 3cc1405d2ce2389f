"""The RUN directory: whose it is, what survives a kill, a damaged file or a full disk."""

import json
import shutil

import pytest
import torch

from attn2mamba.errors import UserError
from attn2mamba.run import Run, check_output, disk_errors, is_whole, load_tensors, tag_of, write_beside, write_text

RECIPE = "seed: 0\n"


def error_of(*arguments) -> str:
    with pytest.raises(UserError) as caught:
        Run(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def checkpoint(run: Run, step: int, keep: int = 10, stage: int = 0):
    return run.save(tag_of(stage, step), lambda path: torch.save({"step": step}, path / "trainer.pt"), keep)


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_directory_of_its_own(tmp_path):
    path = tmp_path / "a" / "b"
    with Run(path, RECIPE, resume=False):
        assert (path / "recipe.yaml").read_text() == RECIPE
    assert "is in use; continue it with --resume" in error_of(path, RECIPE, False)
    assert "has another recipe, teacher or data" in error_of(path, "seed: 1\n", True)
    with Run(path, RECIPE, resume=True):
        pass


def test_checking_writes_nothing(tmp_path):
    assert check_output(tmp_path / "new", RECIPE, resume=False) is False
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_hold_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    assert "is a file" in error_of(tmp_path / "file", RECIPE, False)
    assert "cannot write" in error_of(tmp_path / "file" / "run", RECIPE, False)
    assert "is in use" in error_of(tmp_path / "other", RECIPE, False)
    assert "is not a run of attn2mamba" in error_of(tmp_path / "other", RECIPE, True)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_one_process_at_a_time(tmp_path):
    run = Run(tmp_path, RECIPE, resume=False)
    with pytest.raises(UserError, match="being written by another process"):
        check_output(tmp_path, RECIPE, resume=True)
    assert "being written by another process" in error_of(tmp_path, RECIPE, True)
    run.close()
    Run(tmp_path, RECIPE, resume=True).close()


def test_a_kill_before_the_recipe_is_there(tmp_path):
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".partial-recipe.yaml").write_text("see")
    Run(tmp_path, RECIPE, resume=False).close()
    assert (tmp_path / "recipe.yaml").read_text() == RECIPE


def test_the_newest_checkpoints_are_kept(tmp_path):
    with Run(tmp_path, RECIPE, resume=False) as run:
        for stage, step in [(0, 9), (0, 10), (1, 2), (10, 1)]:
            checkpoint(run, step, keep=2, stage=stage)
        assert names(run) == ["stage1-step00000002", "stage10-step00000001"]
        assert run.latest(pytest.fail) == run.checkpoints / "stage10-step00000001"
        (run.checkpoints / "notes").mkdir()
        checkpoint(run, 2, keep=1, stage=10)
        assert names(run) == ["notes", "stage10-step00000002"]


def half(path):
    path.write_bytes(path.read_bytes()[:10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["trainer.pt", "manifest.json"])
@pytest.mark.parametrize("damage", [half, flip, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, file):
    warnings: list[str] = []
    with Run(tmp_path, RECIPE, resume=False) as run:
        good, bad = checkpoint(run, 1), checkpoint(run, 2)
        damage(bad / file)
        assert is_whole(good) and not is_whole(bad)
        assert run.latest(warnings.append) == good
        assert len(warnings) == 1 and "stage0-step00000002 is damaged" in warnings[0]
        assert load_tensors(good / "trainer.pt") == {"step": 1}


def test_a_damaged_checkpoint_does_not_count_as_the_newest(tmp_path):
    """Saved on after it was passed over: it must not push out what is whole."""
    with Run(tmp_path, RECIPE, resume=False) as run:
        checkpoint(run, 10)
        half(checkpoint(run, 20) / "trainer.pt")
        saved = checkpoint(run, 15, keep=1)
        assert names(run) == [saved.name]
        assert run.latest(pytest.fail) == saved


def test_no_checkpoint_at_all(tmp_path):
    with Run(tmp_path, RECIPE, resume=False) as run:
        assert run.latest(pytest.fail) is None
        half(checkpoint(run, 1) / "trainer.pt")
        assert run.latest(lambda text: None) is None


def test_a_half_written_checkpoint_is_swept_away(tmp_path):
    with Run(tmp_path, RECIPE, resume=False) as run:
        good = checkpoint(run, 1)
        shutil.copytree(good, run.checkpoints / ".partial-stage0-step00000002")
    with Run(tmp_path, RECIPE, resume=True) as run:
        assert names(run) == [good.name]


def test_the_log_is_taken_back_to_the_checkpoint(tmp_path):
    with Run(tmp_path, RECIPE, resume=False) as run:
        for stage, step in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
            run.log({"stage": stage, "step": step})
        with run.metrics_path.open("a") as file:
            file.write('{"stage": 1, "st')  # a kill in the middle of a line
        assert len(run.entries()) == 5
        run.rewind(run.checkpoints / tag_of(0, 1))
        run.log({"stage": 0, "step": 2})
        assert [e["step"] for e in run.entries()] == [0, 1, 2]
        run.rewind(None)
        assert run.entries() == []


def test_the_log_is_json(tmp_path):
    with Run(tmp_path, RECIPE, resume=False) as run:
        run.log({"stage": 0, "step": 1, "loss": float("nan"), "norm": float("inf"), "lr": 0.5})
        (line,) = run.metrics_path.read_text().splitlines()
    expected = {"stage": 0, "step": 1, "loss": None, "norm": None, "lr": 0.5}
    assert json.loads(line, parse_constant=pytest.fail) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_directory_vanishes_and_the_old_one_stays(tmp_path, error):
    with write_beside(tmp_path / "final") as partial:
        (partial / "weights").write_text("old")
    with pytest.raises(error), write_beside(tmp_path / "final") as partial:
        (partial / "weights").write_text("new")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final" / "weights").read_text() == "old"
    with write_beside(tmp_path / "final") as partial:
        (partial / "weights").write_text("new")
    assert (tmp_path / "final" / "weights").read_text() == "new"


def test_errors_of_the_disk_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory"):
        write_text(tmp_path / "file" / "x", "")
    with pytest.raises(UserError, match="no space left"), disk_errors(tmp_path):
        raise OSError(28, "No space left on device")
    with pytest.raises(ZeroDivisionError), disk_errors(tmp_path):
        _ = 1 / 0
