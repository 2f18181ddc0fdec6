"""What reads a report's JSON goes on reading it: a field that goes needs another format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tileops.explain import model, model_run

RECORD = Path(__file__).with_name("format.json")


def fields():
    classes = {
        name: value
        for module in (model_run, model)
        for name, value in vars(module).items()
        if dataclasses.is_dataclass(value)
    }
    return {
        name: sorted(f.name for f in dataclasses.fields(cls))
        for name, cls in sorted(classes.items())
    }


def test_no_field_goes():
    """New fields are recorded by ``python -m tests.explain.test_format``."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert recorded["format"] == model.FORMAT
    now = fields()
    for name, known in recorded["fields"].items():
        assert set(known) <= set(now[name]), name
    assert recorded["fields"] == now, "record the new fields"


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"format": model.FORMAT, "fields": fields()}, indent=1) + "\n")
