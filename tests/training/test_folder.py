"""The run folder from outside."""

from pathlib import Path

from lockstep.training.folder import discarded_if_unused


def test_what_a_killed_run_was_writing_goes_when_the_folder_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    kept = [tmp_path / "journal.jsonl", tmp_path / "weights/best.safetensors"]
    half_written = [tmp_path / ".config.json.7.tmp", tmp_path / "weights/.final.safetensors.7.tmp"]
    for path in kept + half_written:
        path.write_text("{}")
    with discarded_if_unused(tmp_path):
        assert [path.exists() for path in kept + half_written] == [True, True, False, False]
    assert all(path.exists() for path in kept)
