"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[str | None, typer.Option(help="Device. Default: an accelerator if there is one.")]
