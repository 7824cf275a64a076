"""The README's table of architectures says what was measured, of every architecture there is."""

import json

import support_table
import zoo


def test_readme_shows_what_was_measured() -> None:
    assert (
        support_table.BEGIN + support_table.render() + support_table.END
        in (support_table.ROOT / "README.md").read_text()
    )


def test_every_case_of_this_release_was_measured_and_is_right() -> None:
    measured = json.loads((support_table.FILES / f"{support_table.release()}.json").read_text())
    cases = {(name, backend) for name, backends in measured["cases"].items() for backend in backends}
    assert cases == set(zoo.FAMILY_CASES)
    assert set(support_table.NAMES) == set(zoo.FAMILIES)
    for backends in measured["cases"].values():
        for errors in backends.values():
            assert max(errors.values()) < 1e-4
