"""`pagedjax convert`: any readable model to an orbax folder, in the layout and dtype it runs in."""

from __future__ import annotations

from pathlib import Path

import click

from pagedjax.cli.options import Common, OutputFile, common_options, emit_json


@click.command("convert")
@click.argument("target", type=OutputFile(folder=True))
@common_options(settings=("model.model", "model.dtype"))
def command(common: Common, target: Path) -> None:
    """Write the model to the new folder TARGET, which loads without conversion.

    The folder is complete or absent: it is written beside TARGET and renamed at the end.
    """
    from pagedjax.models.hub import convert

    source, dtype = common.config.model.model, common.config.model.dtype
    convert(source, target, dtype=dtype, progress=common.bars, cache_dir=common.cache_dir)
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    if common.as_json:
        emit_json({"source": source, "target": str(target), "bytes": total, "dtype": dtype})
    else:
        print(f"{target}: {source} as {dtype}, {total / 2**20:.0f} MiB")
