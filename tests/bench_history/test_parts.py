"""Programs that write parts of one document keep the parts of others."""

from __future__ import annotations

from pathlib import Path

from bench.parts import put_part


def test_a_part_takes_the_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "BENCHMARKS.md"
    put_part(path, "# One\n\nfirst\n")
    put_part(path, "# Two\n\nsecond\n\n## Below\n\nmore\n")
    assert path.read_text() == "# One\n\nfirst\n\n# Two\n\nsecond\n\n## Below\n\nmore\n"
    put_part(path, "# One\n\nagain\n")
    assert path.read_text() == "# One\n\nagain\n\n# Two\n\nsecond\n\n## Below\n\nmore\n"
